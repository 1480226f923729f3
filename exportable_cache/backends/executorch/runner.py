"""Running a `.pte` through ExecuTorch's Python runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...common.compat.executorch import load_program, operator_names
from ...common.native.kernels import how_to_get_them
from ...errors import BundleError
from .blas_threads import one_blas_thread
from .pte.instructions import called_operators, check_instructions

if TYPE_CHECKING:
    import torch

    from ..base import ProgramDescription

# The runtime's error code MemoryAllocationFailed, as its messages give it.
_NO_MEMORY = "error: 0x:21"
# How the names of this package's operators begin.
_NATIVE_OPERATORS = "exportable_cache::"


class ExecutorchRunner:
    """The methods of one program instance: they share its cache, which starts at zero.

    Raises:
        BundleError: If the file cannot be loaded by this runtime, or is for delegates that it lacks.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        try:
            # Held as well as its methods: they point into it.
            self._program = load_program(path)
            check_instructions(path)
            # Before the runtime looks, because it writes a page to stderr for each operator that it lacks.
            missing = called_operators(path) - operator_names()
            if not missing:
                self._methods = {name: self._program.load_method(name) for name in description.methods}
        except (OSError, RuntimeError) as error:
            _check_runs_here(path)
            remedy = "export the model again"
            if _NO_MEMORY in str(error):
                remedy = (
                    "memory is planned for the longest input: export with a smaller max_encoder_len or prefill_chunk"
                )
            raise BundleError(f"the ExecuTorch runtime cannot load {path.name}: {error}; {remedy}") from error
        if missing:
            raise _missing(path, missing)

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        # Outputs live in the method's planned memory and are overwritten by the next call.
        try:
            with one_blas_thread():
                outputs = self._methods[method]([tensor.contiguous() for tensor in inputs])
        except RuntimeError as error:
            raise BundleError(f"method {method!r} of the program failed: {error}; export the model again") from error
        return outputs[0].clone() if self.methods[method].is_step else tuple(output.clone() for output in outputs)


def _missing(path: Path, operators: frozenset[str]) -> BundleError:
    """Return the refusal of a program that calls operators which the runtime has no kernels for."""
    if any(name.startswith(_NATIVE_OPERATORS) for name in operators):
        remedy = (
            "it was exported with kernels='native' or linears='native' and needs the compiled kernels of this package: "
            f"{how_to_get_them()}; or export the model again without that option"
        )
    else:
        _check_runs_here(path)
        remedy = "install the release of executorch that it was exported with, or export the model again"
    return BundleError(
        f"the ExecuTorch runtime cannot load {path.name}: it has no kernel for {', '.join(sorted(operators))}; {remedy}"
    )


def _check_runs_here(path: Path) -> None:
    """Say so where a file that failed to load is for delegates that this machine's runtime lacks."""
    # The readers of the file's tables belong to the exporter, which takes seconds to import.
    from .delegates.delegates import check_runs_here

    if path.is_file() and path.stat().st_size:
        try:
            check_runs_here(path)
        except BundleError:
            raise
        except Exception:  # the readers take a file for whole, and this one may be anything
            return
