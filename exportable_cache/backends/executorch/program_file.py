"""A program lowered and written to a `.pte`."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.compat.executorch import forget_program
from ...errors import ExportableCacheError, UnsupportedModelError
from ...program.tracing import told_by
from .delegates import BACKEND_IDS, check_cache, check_methods, delegated_calls
from .kernels import check_kernels
from .llm_runner import runner_metadata
from .load_order import make_largest_first
from .lower import lower_programs
from .quantized_tracing import FoldedLinears
from .tied import write_pte

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

    from ...program.program import Program


def write_program(
    program: Program, path: Path, delegate: str = "xnnpack", for_llm_runner: bool = False, own: bool = False
) -> str:
    """Lower a program for a delegate and write it.

    Args:
        for_llm_runner: Insist on what ExecuTorch's own `TextLLMRunner` reads.
        own: Linear layers of 4-bit weights are operators of this package.

    Returns:
        What the file holds, for people.

    Raises:
        UnsupportedModelError: If ExecuTorch cannot lower the model, or has no kernel for an operator of it.
    """
    check_methods(delegate, program)
    lowered = _lowered(program, delegate, for_llm_runner, own)
    holds = f"methods {', '.join(program.methods)}, weights, one cache"
    if delegate != "xnnpack":
        check_cache(delegate, program, lowered)
        calls = ", ".join(f"{count} in {name}" for name, count in delegated_calls(lowered).items())
        holds += f"; calls of {BACKEND_IDS[delegate]}: {calls}"
    write_pte(lowered, path)
    make_largest_first(path)
    forget_program(lowered)
    del lowered
    # Graphs and their nodes refer to one another.
    gc.collect()
    return holds


def _lowered(program: Program, delegate: str, for_llm_runner: bool, own: bool) -> ExecutorchProgramManager:
    with warnings.catch_warnings():
        # Deprecations inside executorch's own operators and passes, hundreds per export, none of the caller's making.
        warnings.simplefilter("ignore", FutureWarning)
        with FoldedLinears(program.model) if delegate == "xnnpack" else nullcontext():
            exported = {name: program.export(name) for name in program.methods}
        metadata = runner_metadata(program, required=for_llm_runner) if "forward" in exported else None
        try:
            lowered = lower_programs(exported, metadata, delegate, own)
        except ExportableCacheError:
            raise
        except Exception as error:  # passes and compilers of ExecuTorch, each with errors of its own
            raise UnsupportedModelError(
                f"{type(program.model).__name__} cannot be lowered for ExecuTorch ({told_by(error)}); "
                "export it for target 'pt2' instead"
            ) from error
    check_kernels(lowered)
    return lowered
