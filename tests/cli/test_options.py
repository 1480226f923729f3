"""Completion candidates, and the checks that options share."""

import pytest
import typer

from exportable_cache.backends.registry import TARGETS
from exportable_cache.cli import options


def test_targets_are_those_of_the_registry():
    assert options.targets() == sorted(TARGETS)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for name in ("artifacts/demo", "artifacts/other", "alone", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("incomplete", "candidates"),
    [
        ("", ["alone", "artifacts/demo", "artifacts/other"]),
        ("ar", ["artifacts/demo", "artifacts/other"]),
        ("artifacts/d", ["artifacts/demo"]),
        ("./al", ["./alone"]),
        (".h", [".hidden"]),
        ("e", []),
        ("missing/x", []),
    ],
)
def test_bundles_complete_to_folders_with_a_manifest(folders, incomplete, candidates):
    assert list(options._complete_bundles(incomplete)) == candidates


def test_absolute_bundles_complete(folders):
    assert list(options._complete_bundles(f"{folders}/al")) == [f"{folders}/alone"]


def test_models_complete_to_demo_and_folders_with_a_config(folders):
    assert list(options._complete_models("")) == ["demo", "models/tiny"]
    assert list(options._complete_models("models/")) == ["models/tiny"]
    assert list(options._complete_bundles_and_demo("d")) == ["demo"]


@pytest.mark.parametrize("given", [None, 1, 7, [1, 2], [], 1.0])
def test_at_least_passes_what_is_large_enough(given):
    assert options.at_least(1)(given) == given


@pytest.mark.parametrize("given", [0, -3, [2, 0], 0.5, float("nan")])
def test_at_least_names_value_and_limit(given):
    with pytest.raises(typer.BadParameter) as caught:
        options.at_least(1)(given)
    value = given if not isinstance(given, list) else 0
    assert str(value) in str(caught.value) and "at least 1" in str(caught.value)
