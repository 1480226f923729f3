"""`exportable-cache doctor`: what it says of the native package, and of GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exportable_cache.backends.executorch.delegates import table
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
    monkeypatch.setattr(doctor_file, "_gpu_remedies", lambda *found: [])
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


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Releases of installed packages, which a test may change."""
    found = {"triton": "3.6.0", "tensorrt_rtx": "1.5.0"}
    monkeypatch.setattr(doctor_file, "_release", found.get)
    return found


def test_it_shows_the_gpu(run, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    for name, value in (("is_available", True), ("device_count", 1), ("memory_reserved", gib), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr("exportable_cache.common.devices.c_compiler", lambda: "gcc")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * gib, 24 * gib))
    found = json.loads(run("doctor", "--json").stdout)
    assert found["gpu"] == "NVIDIA H200, SM 9.0, 10.0 GiB of 24.0 GiB free"
    assert found["compiled_steps"] == "by Triton 3.6.0, replayed as CUDA graphs on cuda"
    assert found["tensorrt"] == "tensorrt-rtx 1.5.0"
    monkeypatch.setattr("exportable_cache.common.devices.c_compiler", lambda: "")
    found = json.loads(run("doctor", "--json").stdout)
    assert found["compiled_steps"] == "none on cuda"
    assert found["remedies"][0] == "for compiled steps on the GPU: install gcc (apt install gcc)"
    packages.clear()
    found = json.loads(run("doctor", "--json").stdout)
    assert found["compiled_steps"] == "none on cuda" and found["tensorrt"] is None
    assert found["remedies"][0] == "for compiled steps on the GPU: pip install triton"
    assert "exportable-cache[tensorrt-rtx]" in found["remedies"][1]


def test_it_says_what_lacks_for_a_gpu(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert doctor_file._gpus() == f"none: torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(doctor_file, "_has_nvidia_driver", lambda: True)
    assert list(doctor_file._gpu_remedies("cpu", "g++")) == [
        "for steps on the NVIDIA GPU of this machine: install a build of torch with CUDA"
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert list(doctor_file._gpu_remedies("cpu", "g++"))[0].endswith(
        "install a driver for CUDA 13.0, or torch for that of this driver"
    )
    monkeypatch.setattr(doctor_file, "_has_nvidia_driver", lambda: False)
    assert list(doctor_file._gpu_remedies("cpu", "g++")) == []
    monkeypatch.setattr("exportable_cache.common.devices.shutil.which", lambda name: None)
    assert doctor_file._compiler("cpu") == ""
    assert list(doctor_file._gpu_remedies("cpu", "")) == ["for compiled steps of models: install g++ (apt install g++)"]


def test_each_delegate_has_a_row_with_what_it_needs(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that a delegate does not take is shown."""
    version = table.metadata.version
    monkeypatch.setattr(table.metadata, "version", lambda name: "2026.1" if name == "openvino" else version(name))
    shown = run("doctor").stdout
    assert "\\n" not in shown and "delegate xnnpack" in shown
    found = json.loads(run("doctor", "--json").stdout)["delegates"]["openvino"]
    assert "it needs openvino<2026,>=2025.1, and 2026.1 is installed; pip install" in found
