"""`exportable-cache doctor`: what it says of the native package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exportable_cache.cli import doctor as doctor_file

pytest.importorskip("executorch", reason="the executorch extra is not installed")


class Kernels:
    target, path, threads = "AVX3", Path("/there/kernels.so"), 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without the native package, which lacks nothing to build it."""
    for variable in ("EXPORTABLE_CACHE_KERNELS", "EXPORTABLE_CACHE_KERNELS_TARGET", "EXPORTABLE_CACHE_RUNNER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(doctor_file, "load_native_kernels", lambda: None)
    monkeypatch.setattr(doctor_file, "found_library", lambda: None)
    monkeypatch.setattr("exportable_cache.backends.executorch.native.build.missing_tools", lambda: "")
    return monkeypatch


def said(run) -> tuple[str, str, list[str]]:
    found = json.loads(run("doctor", "--json").stdout)
    return found["kernels"], found["runner"], found["remedies"]


def test_it_says_how_to_build_what_is_missing(run, machine: pytest.MonkeyPatch) -> None:
    kernels, runner, remedies = said(run)
    assert kernels == "not loaded; ExecuTorch's are used" and runner == "not built"
    assert remedies == ["for faster steps, and a start without torch: exportable-cache native build"]
    lacking = "Google Highway (apt install libhwy-dev)"
    machine.setattr("exportable_cache.backends.executorch.native.build.missing_tools", lambda: lacking)
    assert said(run)[2][0].endswith(f"exportable-cache native build; it needs {lacking}")


def test_it_shows_what_is_there(run, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(doctor_file, "load_native_kernels", Kernels)
    kernels, runner, remedies = said(run)
    # The runner is still missing.
    assert kernels == "native, AVX3, /there/kernels.so" and len(remedies) == 1
    machine.setattr(doctor_file, "found_library", lambda: Path("/there/runner.so"))
    assert said(run)[1:] == ("/there/runner.so", [])


def test_a_variable_that_leaves_the_kernels_out_is_named(run, machine: pytest.MonkeyPatch) -> None:
    machine.setenv("EXPORTABLE_CACHE_KERNELS", "executorch")
    assert "unset it for native ones" in said(run)[2][0]
