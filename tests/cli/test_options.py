"""Completion candidates, and the checks that options share."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from exportable_cache import export
from exportable_cache.backends.registry import TARGETS
from exportable_cache.cli import options
from exportable_cache.cli.app import app, application
from exportable_cache.errors import InputError


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


# -- spellings


def _options_of_commands() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return the command, name in Python and spellings of each option."""
    group = typer.main.get_command(application())
    return [
        (name, option.name, (*option.opts, *option.secondary_opts))
        for name, command in group.commands.items()
        for option in command.params
        if option.param_type_name == "option" and option.name != "help"
    ]


#: Options whose word is reserved in Python.
_OTHERWISE = {"--for"}


def test_an_option_is_spelled_as_its_argument_in_python() -> None:
    options = _options_of_commands()
    assert len(options) > 50
    for command, name, spellings in options:
        expected = "--" + name.replace("_", "-")
        assert expected == spellings[0] or spellings[0] in _OTHERWISE, (command, name, spellings)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("--max-seq-len", "64"), ("--max-cache-len", "64")),
        (("--kv-bits", "8"), ("--kv-dtype", "int8")),
        (("--kv-bits", "4"), ("--kv-dtype", "int4")),
        (("--qlinear", "8da4w"), ("--quantize", "8da4w")),
        (("--qembedding", "8w"), ("--quantize-embeddings", "8w")),
        (("--output-dir", "out"), ("-o", "out")),
    ],
)
def test_spellings_of_other_tools_mean_the_same(
    theirs: tuple[str, str], ours: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(model: str, **options: Any) -> None:
        asked.append({name: value for name, value in options.items() if name != "progress"})
        raise InputError("asked")

    monkeypatch.setattr("exportable_cache.pipeline.export.export", refuse)
    needed = {"--max-cache-len": ("-n", "32"), "-o": ("-o", "folder")}
    needed.pop(ours[0], None)
    for option in (theirs, ours):
        result = CliRunner().invoke(
            app, ["export", "demo", *option, *(part for pair in needed.values() for part in pair)]
        )
        assert result.exit_code == 2 and "asked" in result.stderr, result.output
    assert asked[0] == asked[1]


def test_an_unknown_modality_is_refused_before_anything_is_read(run: Any) -> None:
    result = run("export", "no/model", "-n", 8, "-o", "out", "--modalities", "smell")
    assert result.exit_code == 2 and "must be a list of image, video, audio, got 'smell'" in result.stderr
    for modalities in (["smell"], "image"):
        with pytest.raises(InputError, match="modalities must be a list of image, video, audio, got '(smell|image)'"):
            export("no/model", "pt2", 8, "out", modalities=modalities)
