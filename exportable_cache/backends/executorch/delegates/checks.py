"""Checks of a program before and after a delegate's compiler, and where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....common.compat.executorch import available_backends
from ....errors import BundleError, UnsupportedModelError
from ..pte.instructions import called_delegates
from .table import DELEGATES, Delegate

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

    from ....program.program import Program


def check_methods(delegate: Delegate, program: Program) -> None:
    """Refuse methods that a delegate's compiler does not take.

    Raises:
        UnsupportedModelError: If the program has others than `Delegate.lengths` says.
    """
    wanted, remedy = _METHODS.get(delegate.lengths, ((), ""))
    if wanted and not set(program.methods) <= set(wanted):
        raise UnsupportedModelError(
            f"methods must be {' and '.join(wanted)} only for delegate {delegate.name!r}, got "
            f"{', '.join(program.methods)}; {remedy}"
        )


_OTHER = "export for delegate 'xnnpack'"
#: Names of the methods by `Delegate.lengths`, and what to do about others.
_METHODS = {
    "one": (("decode",), "export with prefill_chunk=1 (--prefill-chunk 1), so that prompts are fed token by token"),
    "fixed": (("decode", "prefill"), _OTHER),
    "forward": (("forward",), _OTHER),
}


def check_cache(
    delegate: Delegate, program: Program, lowered: ExecutorchProgramManager, allow_partial: bool = False
) -> None:
    """Refuse a program that is not divided between the delegate and the runtime in a way that is known to work.

    Args:
        delegate: The delegate.
        program: The program.
        lowered: Its lowering.
        allow_partial: Accept several calls in a method, and state outside the delegate.

    Raises:
        UnsupportedModelError: If a part of the cache is elsewhere, or a method is in several pieces.
    """
    if delegate.name in ("xnnpack", "tensorrt") or allow_partial:
        return
    cache_bytes = sum(
        tensor.nbytes for name, tensor in program.cache.named_state() if not name.endswith(".cumulative_length")
    )
    expected = 0 if delegate.cache == "inside" else cache_bytes
    for plan in lowered.executorch_program.execution_plan:
        if plan.name not in program.methods:
            continue
        # Arenas after that of the activations hold the mutable buffers.
        outside = sum(plan.non_const_buffer_sizes[2:])
        # Vulkan leaves the writes of the cache to the runtime.
        if outside == expected and (len(plan.delegates) == 1 or delegate.name == "vulkan"):
            continue
        others = sorted({one.name for one in plan.operators})
        partial = "" if "allow_partial" not in delegate.options else "; or pass allow_partial=True (--allow-partial)"
        raise UnsupportedModelError(
            f"delegate {delegate.name!r} splits {plan.name} into {len(plan.delegates)} calls with {outside} of "
            f"{cache_bytes} bytes of the cache outside them, expected {'1 call and ' if partial else ''}{expected}; "
            f"the runtime would compute {', '.join(others) or 'nothing'}; {_OTHER}{partial}"
        )


def check_whole(delegate: Delegate, program: Program, lowered: ExecutorchProgramManager) -> None:
    """Refuse a program of which a delegate does not take each method whole.

    Raises:
        UnsupportedModelError: If a part of it would run outside.
    """
    for plan in lowered.executorch_program.execution_plan:
        others = sorted({one.name for one in plan.operators})
        if plan.name in program.methods and (len(plan.delegates) != 1 or others):
            raise UnsupportedModelError(
                f"delegate {delegate.name!r} splits {plan.name} of {type(program.model).__name__} into "
                f"{len(plan.delegates)} calls, and leaves {', '.join(others) or 'nothing'} to the runtime; {_OTHER}"
            )


def delegated_calls(lowered: ExecutorchProgramManager) -> dict[str, int]:
    """Return the number of delegate calls by method."""
    return {plan.name: len(plan.delegates) for plan in lowered.executorch_program.execution_plan if plan.delegates}


def check_runs_here(path: Path) -> None:
    """Refuse a file for delegates that this machine's runtime lacks.

    Raises:
        BundleError: If a delegate is missing, or a package that it loads.
    """
    try:
        called = called_delegates(path)
    except (BundleError, OSError, ValueError):  # damaged, missing or empty, of which the runtime's error says more
        return
    available = available_backends()
    missing = sorted(called - available)
    if missing:
        loaded = [one for one in DELEGATES.values() if one.backend_id in missing and one.verified == "executed"]
        install = "".join(f"{one.install}, " for one in loaded)
        raise BundleError(
            f"{path.name} is for {', '.join(missing)}, which the ExecuTorch runtime of this machine lacks (it has "
            f"{', '.join(sorted(available))}); {install}run it on a device that has it, or {_OTHER}"
        )


def not_executed_remark(delegate: Delegate) -> str:
    """Return the remark of a verification for a delegate that this machine cannot execute."""
    remark = (
        f"the XNNPACK lowering of the same exported program was run; the program for {delegate.backend_id} is "
        "not executed here"
    )
    return f"{remark}, and keeps its cache in float16" if delegate.name == "coreml" else remark
