"""The `executorch` target."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...program import Form, Program
from ..base import LoweredFile, ProgramDescription, Runner
from .fused import EXECUTORCH_ATTENTION, fuse_layers
from .lower import lower_programs
from .llm_runner import runner_metadata
from .runner import ExecutorchRunner
from .tied import write_pte

FILE = "program.pte"


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, with XNNPACK as delegate.

    Options:
        llm_runner: Add what ExecuTorch's own `TextLLMRunner` asks for: a method `forward(tokens [1, S], input_pos [1])` for
            any S up to the longest chunk, and the constant methods that describe the model.
    """

    name = "executorch"
    packages = ("executorch",)
    # ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows; rows of their own length would be copied.
    max_batch_size = 1
    # 8-bit weights without 8-bit activations have a kernel here that was 4 times slower than float32 for one token, and 80 times
    # for 32.
    linear_schemes = ("8da4w", "8da8w")
    embedding_schemes = ("8w", "4w")

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - {"llm_runner"})
        if unknown:
            raise InputError(f"target 'executorch' has no option {unknown[0]!r}; it knows llm_runner")
        return {
            "attention": EXECUTORCH_ATTENTION,
            "form": Form.RESIDENT,
            # The grouped expert kernels have no ExecuTorch counterpart; batched products do.
            "experts": "batched_mm",
            "adapt": fuse_layers,
            "forward": bool(options.get("llm_runner", False)),
        }

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        with warnings.catch_warnings():
            # Deprecations inside executorch's own operators and passes, hundreds per export, none of the caller's making.
            warnings.simplefilter("ignore", FutureWarning)
            exported = {name: program.export(name) for name in program.methods}
            lowered = lower_programs(exported, runner_metadata(program) if "forward" in program.methods else None)
        write_pte(lowered, folder / FILE)
        return [LoweredFile(FILE, f"methods {', '.join(exported)}, weights, one cache")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        return ExecutorchRunner(folder / FILE, description)
