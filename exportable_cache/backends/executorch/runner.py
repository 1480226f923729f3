"""Running a `.pte` through ExecuTorch's Python runtime."""

from __future__ import annotations

from pathlib import Path

import executorch.extension.llm.custom_ops.custom_ops
import executorch.kernels.quantized  # noqa: F401  and these, where embeddings are quantised
import torch
from executorch.runtime import Runtime, Verification

from ...errors import BundleError
from ..base import ProgramDescription
from .blas_threads import one_blas_thread
from .delegates import check_runs_here

# The runtime's error code MemoryAllocationFailed, as its messages give it.
_NO_MEMORY = "error: 0x:21"


class ExecutorchRunner:
    """The methods of one program instance: they share its cache, which starts at zero.

    Raises:
        BundleError: If the file cannot be loaded by this runtime, or is for delegates that it lacks.
    """

    def __init__(self, path: Path, description: ProgramDescription) -> None:
        self.methods = description.methods
        if path.is_file() and path.stat().st_size:
            check_runs_here(path)
        try:
            # Held as well as its methods: they point into it.
            self._program = Runtime.get().load_program(path, verification=Verification.Minimal)
            self._methods = {name: self._program.load_method(name) for name in description.methods}
        except (OSError, RuntimeError) as error:
            remedy = "export the model again"
            if _NO_MEMORY in str(error):
                remedy = (
                    "memory is planned for the longest input: export with a smaller max_encoder_len or prefill_length"
                )
            raise BundleError(f"the ExecuTorch runtime cannot load {path.name}: {error}; {remedy}") from error

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        # Outputs live in the method's planned memory and are overwritten by the next call.
        with one_blas_thread():
            outputs = self._methods[method].execute([tensor.contiguous() for tensor in inputs])
        return outputs[0].clone() if self.methods[method].is_step else tuple(output.clone() for output in outputs)
