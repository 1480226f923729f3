"""Delegates by name: those whose compilers work from what the ExecuTorch wheel brings, on Linux, ahead of time.

| name | compiler | methods | cache |
|---|---|---|---|
| `xnnpack` | in the wheel; runs here | all | outside the delegate, written in place by fused operators |
| `vulkan` | in the wheel | `decode` | outside: written by a portable kernel and handed to the delegate for each step |
| `coreml` | coremltools, a dependency of the wheel; iOS 18, macOS 15 | `decode` | inside, in float16 |

The last two compile one static step: a prompt goes in token by token. A delegate that takes the cache in has one per
method, so that prefill would fill another than decode reads, silently; and executorch 1.4.1 does not lower a dynamic
length for either (Core ML's converter takes no symbolic sizes; Vulkan's partitions for dynamic shapes fail in memory
planning).

Not offered, since nothing could be compiled with executorch 1.4.1 from PyPI: MLX (its serialiser is not in the wheel),
Qualcomm, OpenVINO, MediaTek, Samsung, NXP, Arm Ethos-U and VGF, CUDA (each needs a vendor's SDK or another package),
Metal (a Mac). Nor portable kernels alone: without XNNPACK a sliding-window model gave not-a-number on the runtime.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.runtime import Runtime

from ....common.compat.executorch import extended_header, flat_program
from ....errors import BundleError, MissingDependencyError, UnsupportedModelError
from ..options import ELSEWHERE

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

    from ....program.program import Program

#: Those that this package's own lowering serves: name -> ids of delegates in the file.
BACKEND_IDS = {"xnnpack": "XnnpackBackend", "vulkan": "VulkanBackend", "coreml": "CoreMLBackend"}

_HEADER_BYTES = 64


def partitioners_for(delegate: str) -> list[Any]:
    """What assigns a graph's operators to a delegate.

    Raises:
        MissingDependencyError: If its compiler is not installed.
    """
    if delegate == "vulkan":
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

        return [VulkanPartitioner()]
    if delegate == "coreml":
        return [_core_ml_partitioner()]
    from .xnnpack import AcyclicXnnpackPartitioner

    return [AcyclicXnnpackPartitioner()]


def _core_ml_partitioner() -> Any:
    if util.find_spec("coremltools") is None:
        raise MissingDependencyError(
            "delegate 'coreml' needs coremltools, which is not installed; pip install coremltools"
        )
    with _quiet():
        import coremltools
        from executorch.backends.apple.coreml.compiler import CoreMLBackend
        from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        # The first that has state inside a model.
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
    )
    return CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)


def check_methods(delegate: str, program: Program) -> None:
    """Refuse methods that a delegate's compiler does not take.

    Raises:
        UnsupportedModelError: If it is to compile anything but one static decode step, and can do nothing else.
    """
    if delegate in ELSEWHERE and list(program.methods) != ["decode"]:
        raise UnsupportedModelError(
            f"delegate {delegate!r} compiles one method of one token, this program has {', '.join(program.methods)}; "
            "export with prefill_chunk=1 (--prefill-chunk 1), so that prompts go in token by token"
        )


def check_cache(delegate: str, program: Program, lowered: ExecutorchProgramManager) -> None:
    """Refuse a program whose cache is not where the delegate is known to keep it.

    Raises:
        UnsupportedModelError: If some of it is on the other side.
    """
    if delegate not in ELSEWHERE:
        return
    cache_bytes = sum(
        tensor.nbytes for name, tensor in program.cache.named_state() if not name.endswith(".cumulative_length")
    )
    (plan,) = (plan for plan in lowered.executorch_program.execution_plan if plan.name == "decode")
    # The arena after that of the activations holds the mutable buffers.
    outside = sum(plan.non_const_buffer_sizes[2:])
    expected = 0 if delegate == "coreml" else cache_bytes
    if outside != expected or (delegate == "coreml" and len(plan.delegates) != 1):
        raise UnsupportedModelError(
            f"delegate {delegate!r} splits this model into {len(plan.delegates)} calls with {outside} of {cache_bytes} "
            f"bytes of the cache outside them, where {expected} are expected; nothing is known to run that rightly: "
            "export for delegate 'xnnpack'"
        )


def delegated_calls(lowered: ExecutorchProgramManager) -> dict[str, int]:
    """Calls into a delegate, by method."""
    return {plan.name: len(plan.delegates) for plan in lowered.executorch_program.execution_plan if plan.delegates}


def delegate_ids(path: Path) -> set[str]:
    """Ids of the delegates that a `.pte` calls.

    Raises:
        BundleError: If the file is none.
    """
    with path.open("rb") as file:
        header = extended_header(file.read(_HEADER_BYTES))
        if header is None:
            raise BundleError(
                f"the ExecuTorch runtime cannot load {path.name}: it has no program; export the model again"
            )
        file.seek(0, os.SEEK_SET)
        table = file.read(header.segment_base_offset or header.program_size)
    program = flat_program(table)
    plans = [program.ExecutionPlan(index) for index in range(program.ExecutionPlanLength())]
    return {plan.Delegates(index).Id().decode() for plan in plans for index in range(plan.DelegatesLength())}


def check_runs_here(path: Path) -> None:
    """Refuse a file for delegates that this machine's runtime lacks.

    Raises:
        BundleError: If it lacks one.
    """
    available = set(Runtime.get().backend_registry.registered_backend_names)
    missing = sorted(delegate_ids(path) - available)
    if missing:
        raise BundleError(
            f"{path.name} is for {', '.join(missing)}, which the ExecuTorch runtime of this machine lacks (it has "
            f"{', '.join(sorted(available))}); run it on a device that has it, or export for delegate 'xnnpack'"
        )


def elsewhere_remark(delegate: str) -> str:
    """What verification says of a program that this machine cannot execute."""
    remark = (
        f"the XNNPACK lowering of the same exported program was run; the program for {BACKEND_IDS[delegate]} is "
        "not executed here"
    )
    return f"{remark}, and keeps its cache in float16" if delegate == "coreml" else remark


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
