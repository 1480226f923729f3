"""Versions that go together: executorch and torch, and what the constraints and the metadata say of them."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from exportable_cache.backends.registry import backend_for
from exportable_cache.common.compat import executorch as compat
from exportable_cache.errors import MissingDependencyError

REPOSITORY = Path(__file__).parents[2]
ENDS = ("oldest", "newest")


def constraints(name: str) -> dict[str, str]:
    """Package -> version of a constraints file; where Python decides, that of the newest Python."""
    lines = (REPOSITORY / "constraints" / f"{name}.txt").read_text().splitlines()
    found: dict[str, str] = {}
    for package, version in (re.match(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if line[:1] not in "#"):
        found.setdefault(package, version)
    return found


def declared() -> dict[str, str]:
    """Package -> range, of what users install for ExecuTorch."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found = {}
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["executorch"]):
        name, versions = re.match(r"([\w.-]+)([^;]*)", requirement).groups()
        found.setdefault(name, versions)
    return found


@pytest.mark.parametrize(
    ("executorch", "torch"), [("1.4.0", "2.13.0"), ("1.4.0", "2.13.1+cu130"), ("1.5.1", "2.14.1"), ("1.5.1", "2.15.0")]
)
def test_a_pair_that_runs_together_passes(executorch: str, torch: str) -> None:
    compat.refuse_pair(executorch, torch)


@pytest.mark.parametrize(
    ("executorch", "torch", "remedies"),
    [
        ("1.4.1", "2.14.1", ("torch==2.13.*", "executorch==1.5.*")),
        ("1.5.1", "2.13.0+cpu", ("torch==2.14.*", "executorch==1.4.*")),
        ("1.4.1", "2.15.0", ("torch==2.13.*", "executorch==1.5.*")),
        ("1.5.1", "2.16.0", ("torch==2.14.*",)),
        ("1.3.1", "2.13.0", ("executorch==1.4.*",)),
    ],
)
def test_another_pair_is_refused_with_both_versions_and_the_remedy(
    executorch: str, torch: str, remedies: tuple[str, ...]
) -> None:
    with pytest.raises(MissingDependencyError) as caught:
        compat.refuse_pair(executorch, torch)
    message = str(caught.value)
    assert all(part in message for part in (executorch, torch, *remedies))


def test_a_pair_of_later_releases_is_let_through() -> None:
    compat.refuse_pair("2.7.0", "4.1.0")


def test_the_target_is_refused_before_anything_of_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"executorch": "1.4.1", "torch": "2.14.1"}
    monkeypatch.setattr(compat.metadata, "version", installed.__getitem__)
    compat.check_pair.cache_clear()
    try:
        for use in (lambda: backend_for("executorch"), compat.runtime.__wrapped__):
            with pytest.raises(MissingDependencyError, match=r"executorch 1\.4\.1 is installed with torch 2\.14\.1"):
                use()
    finally:
        compat.check_pair.cache_clear()


@pytest.mark.parametrize("name", ["default", *ENDS])
def test_each_set_of_constraints_is_a_pair_inside_the_ranges(name: str) -> None:
    from packaging.specifiers import SpecifierSet

    pinned, ranges = constraints(name), declared()
    compat.refuse_pair(pinned["executorch"], pinned["torch"])
    for package, version in pinned.items():
        if package in ranges:
            assert version in SpecifierSet(ranges[package]), package
    assert {"torch", "transformers", "executorch", "torchao"} <= pinned.keys()


def test_the_two_ends_differ_by_a_minor_release() -> None:
    old, new = (constraints(name) for name in ENDS)
    for package in ("torch", "transformers", "executorch"):
        assert old[package].split(".")[:2] != new[package].split(".")[:2]


def test_the_installed_pair_is_one_that_goes_together() -> None:
    pytest.importorskip("executorch")
    compat.refuse_pair(metadata.version("executorch"), metadata.version("torch"))
