"""The commands for this machine: `doctor` shows its processor, GPU, libraries and kernels; `native` builds kernels."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

import typer

from exportable_cache_runner.library import VARIABLE as RUNNER_VARIABLE
from exportable_cache_runner.library import found_library

from ..common.native.kernels import BUILD, TARGET_VARIABLE, VARIABLE, load_native_kernels
from ..common.progress import bytes_text
from ..errors import ExportableCacheError
from .command import Command
from .options import JsonOption
from .terminal import Terminal, simple_table


def doctor(ctx: typer.Context, json: JsonOption = False) -> None:
    """Show processor, GPU, libraries, and what would be faster."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries"):
        found = diagnose()
    if json:
        terminal.json(found.to_dict())
        return
    table = simple_table("", "")
    threads = "" if found.runtime_threads is None else f", {found.runtime_threads} threads"
    for name, value in (
        ("processor", f"{found.processor}, {found.cores} cores, {found.instruction_set}"),
        ("gpu", found.gpu),
        ("torch", found.torch),
        ("compiled steps", found.compiled_steps),
        ("executorch", "not installed" if found.executorch is None else f"{found.executorch}{threads}"),
        *((f"delegate {delegate}", done) for delegate, done in found.delegates.items()),
        ("native kernels", found.kernels),
        ("runner without torch", found.runner),
        ("tensorrt", "not installed" if found.tensorrt is None else found.tensorrt),
    ):
        table.add_row(name, value)
    terminal.print(table)
    for remedy in found.remedies or ["no faster setup is known for this machine"]:
        terminal.print(remedy)


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        processor: Name of the processor.
        instruction_set: Best instruction set that torch uses.
        cores: Number of logical cores that this process may use.
        gpu: Name, compute capability and memory of each GPU that torch finds; otherwise why it finds none.
        torch: Release, threads, and matrix library of torch.
        compiled_steps: Compiler that `compile=True` uses on the device that commands choose by default.
        executorch: Release of executorch, or None.
        runtime_threads: Threads of ExecuTorch's pool; None without this package's kernels, which report them.
        delegates: What can be done here with each of ExecuTorch's delegates; empty without executorch.
        kernels: Kernels that compute attention: instruction set and path of native ones.
        runner: Path of the C++ runner's library, or `not built`.
        tensorrt: Name and release of the TensorRT package, or None.
        remedies: Possible speed-ups, one sentence each.
    """

    processor: str
    instruction_set: str
    cores: int
    gpu: str
    torch: str
    compiled_steps: str
    executorch: str | None
    runtime_threads: int | None
    delegates: dict[str, str]
    kernels: str
    runner: str
    tensorrt: str | None
    remedies: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Inspect the machine and the installed packages. Loads the ExecuTorch runtime if there is one.

    Raises:
        MissingDependencyError: If `EXPORTABLE_CACHE_KERNELS` names kernels that cannot be loaded.
    """
    import torch

    from ..common.devices import chosen_device
    from ..common.native.machine_code import processor_name

    device = chosen_device()
    compiler = _compiler(device.type)
    release = _release("executorch")
    kernels, delegates = None, {}
    if release is not None:
        from ..common.compat.executorch import available_backends

        delegates = _delegates(available_backends())
        kernels = load_native_kernels()
    runner = os.environ.get(RUNNER_VARIABLE) or found_library()
    served = "not loaded; ExecuTorch's are used" if release else "none, because executorch is not installed"
    if kernels is not None:
        served = f"native, {kernels.target}, {kernels.path}"
    return Diagnosis(
        processor=processor_name(),
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=_gpus(),
        torch=f"{torch.__version__}, {torch.get_num_threads()} threads, {_blas(torch.__config__.show())}",
        compiled_steps=f"by {compiler} on {device.type}" if compiler else f"none on {device.type}",
        executorch=release,
        runtime_threads=None if kernels is None else kernels.threads,
        delegates=delegates,
        kernels=served,
        runner="not built" if runner is None else str(runner),
        tensorrt=_tensorrt(),
        remedies=[
            *_gpu_remedies(device.type, compiler),
            *_remedies(release, kernels is not None, runner is not None),
        ],
    )


def _delegates(available: Collection[str]) -> dict[str, str]:
    """Return what can be done here with each delegate: lowered, executed, evaluated.

    Args:
        available: Ids of the delegates that the runtime has.
    """
    from ..backends.executorch.delegates.table import DELEGATES

    found = {}
    for name, delegate in DELEGATES.items():
        if name == "tensorrt":  # It has a line of its own.
            continue
        done = ["lowered"] if delegate.is_lowered_here else []
        if delegate.backend_id in available:
            done.append("executed")
        elif delegate.is_evaluated_here:
            done.append("evaluated")
        lacks = not done or (len(done) == 1 and delegate.verified != "lowered")
        needs = f"it needs {delegate.missing}; " if delegate.missing else ""
        found[name] = ", ".join(done or ["nothing"]) + (f"; {needs}{delegate.install}" if lacks else "")
    return found


def _gpus() -> str:
    """Return the GPUs that torch finds with their memory, or why it finds none."""
    import torch

    from ..common.devices import free_and_total, missing_reason

    if torch.backends.mps.is_available():
        return "Apple's, device mps"
    reason = missing_reason(torch.device("cuda"))
    if reason:
        return f"none: {reason}"
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(device)
        memory = free_and_total(device)
        assert memory is not None
        free, total = map(bytes_text, memory)
        found.append(f"{torch.cuda.get_device_name(device)}, SM {major}.{minor}, {free} of {total} free")
    return "; ".join(found)


def _compiler(device: str) -> str:
    """Return what compiles steps on a device, "" if nothing does."""
    from ..common.devices import c_compiler, cpp_compiler

    if device == "cuda":
        triton = _release("triton")
        return "" if triton is None or not c_compiler() else f"Triton {triton}, replayed as CUDA graphs"
    return cpp_compiler() if device == "cpu" else "torch.compile"


def _tensorrt() -> str | None:
    """Return the TensorRT package that programs are built with, or None."""
    releases = ((name, _release(name.replace("-", "_"))) for name in ("tensorrt-rtx", "tensorrt"))
    return next((f"{name} {release}" for name, release in releases if release is not None), None)


def _has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None


def _gpu_remedies(device: str, compiler: str) -> Iterator[str]:
    import torch

    if device != "cuda" and _has_nvidia_driver():
        built = torch.version.cuda
        remedy = (
            f"a driver for CUDA {built}, or torch for that of this driver" if built else "a build of torch with CUDA"
        )
        yield f"for steps on the NVIDIA GPU of this machine: install {remedy}"
    if device == "cuda" and not compiler:
        remedy = "pip install triton" if _release("triton") is None else "install gcc (apt install gcc)"
        yield f"for compiled steps on the GPU: {remedy}"
    if device == "cuda" and _tensorrt() is None:
        yield "for TensorRT programs: pip install 'exportable-cache[tensorrt-rtx]', and export with --target tensorrt"
    if device == "cpu" and not compiler:
        yield "for compiled steps of models: install g++ (apt install g++)"


def _remedies(release: str | None, has_native: bool, has_runner: bool):
    if release is None:
        yield "to run bundles for ExecuTorch: pip install 'exportable-cache[executorch]'"
        return
    if not has_native and os.environ.get(VARIABLE):
        yield f"{VARIABLE}={os.environ[VARIABLE]} selects ExecuTorch's attention kernels; unset it for native ones"
    elif not has_native or not has_runner:
        from ..backends.executorch.native.build import missing_tools

        missing = missing_tools()
        yield f"for faster steps, and a start without torch: {BUILD}{'; it needs ' if missing else ''}{missing}"
    if has_native and os.environ.get(TARGET_VARIABLE):
        yield f"{TARGET_VARIABLE}={os.environ[TARGET_VARIABLE]} limits the kernels; unset it"


def _blas(config: str) -> str:
    """Return the matrix library that torch was built with, from `torch.__config__.show()`."""
    found = re.search(r"(?:oneAPI )?Math Kernel Library Version (\S+)", config)
    if found is None:
        named = re.search(r"BLAS_INFO=(\w+)", config)
        return f"BLAS {named.group(1)}" if named else "BLAS unknown"
    from ..common.native.machine_code import cpu_fields

    path = "" if cpu_fields().get("vendor_id", "GenuineIntel") == "GenuineIntel" else _NOT_INTEL
    return f"MKL {found.group(1)}{path}"


# A profile of an EPYC of Zen 3 showed `mkl_blas_def_sgemm` under ExecuTorch's attention.
_NOT_INTEL = ", which may take its generic path, as this processor is not Intel's"


def _release(package: str) -> str | None:
    if util.find_spec(package) is None:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown release"


native = typer.Typer(help="Build native kernels and the runner without torch.", no_args_is_help=True)


@native.command(cls=Command)
def build(
    ctx: typer.Context,
    sources: Annotated[
        Path | None,
        typer.Option("--sources", metavar="DIR", help="Clone of the repository.", show_default="this checkout"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default="in this environment"),
    ] = None,
    optional: Annotated[
        bool, typer.Option("--optional", help="Succeed with one line if it cannot be built here.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compile native kernels and the runner without torch into this environment.

    Nothing is compiled if sources and executorch are those of the last build.
    """
    from ..backends.executorch.native.build import build_native

    terminal: Terminal = ctx.obj
    try:
        with terminal.progress("compiling the native package"):
            package = build_native(sources, output)
    except ExportableCacheError as error:
        if not optional:
            raise
        # The remedy is the last line; the compiler's output is before it.
        reason = str(error).splitlines()[-1]
        if json:
            terminal.json({"kernels": None, "runner": None, "is_new": False, "reason": reason})
        else:
            terminal.print(f"native package: not built: {reason}")
        return
    if json:
        found = {"kernels": str(package.kernels), "runner": str(package.runner), "is_new": package.is_new}
        terminal.json(found | {"reason": None})
    else:
        terminal.print(f"native package: {'built' if package.is_new else 'up to date'}: {package.kernels.parent}")
