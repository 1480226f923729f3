"""Running a `.pte` through ExecuTorch's Python runtime."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.compat.executorch import load_program
from ...errors import BundleError
from .blas_threads import one_blas_thread
from .instructions import check_instructions

if TYPE_CHECKING:
    import torch

    from ..base import ProgramDescription

# The runtime's error codes MemoryAllocationFailed and OperatorMissing, as its messages give them.
_NO_MEMORY = "error: 0x:21"
_NO_OPERATOR = "error: 0x:14"
# How the names of this package's operators begin in a file.
_OWN_OPERATORS = b"exportable_cache::"


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
            self._methods = {name: self._program.load_method(name) for name in description.methods}
        except (OSError, RuntimeError) as error:
            calls_own = _NO_OPERATOR in str(error) and _calls_own_operators(path)
            if not calls_own:
                _check_runs_here(path)
            remedy = "export the model again"
            if _NO_MEMORY in str(error):
                remedy = (
                    "memory is planned for the longest input: export with a smaller max_encoder_len or prefill_chunk"
                )
            if calls_own:
                remedy = (
                    "it was exported with kernels='own' or linears='own' and needs the compiled kernels of this "
                    "package: exportable-cache kernels build; or export the model again without that option"
                )
            raise BundleError(f"the ExecuTorch runtime cannot load {path.name}: {error}; {remedy}") from error

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        # Outputs live in the method's planned memory and are overwritten by the next call.
        try:
            with one_blas_thread():
                outputs = self._methods[method]([tensor.contiguous() for tensor in inputs])
        except RuntimeError as error:
            raise BundleError(f"method {method!r} of the program failed: {error}; export the model again") from error
        return outputs[0].clone() if self.methods[method].is_step else tuple(output.clone() for output in outputs)


def _calls_own_operators(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        return contents.find(_OWN_OPERATORS) >= 0


def _check_runs_here(path: Path) -> None:
    """Say so where a file that failed to load is for delegates that this machine's runtime lacks."""
    # The readers of the file's tables belong to the exporter, which takes seconds to import.
    from .delegates import check_runs_here

    if path.is_file() and path.stat().st_size:
        try:
            check_runs_here(path)
        except BundleError:
            raise
        except Exception:  # the readers take a file for whole, and this one may be anything
            return
