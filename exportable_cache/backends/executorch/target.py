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
from .runner import ExecutorchRunner

FILE = "program.pte"


class ExecutorchBackend:
    """Programs for the ExecuTorch runtime, with XNNPACK as delegate. It has no options yet."""

    name = "executorch"
    packages = ("executorch",)

    def program_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options:
            raise InputError(f"target 'executorch' has no option {sorted(options)[0]!r}; it takes none")
        # The grouped expert kernels have no ExecuTorch counterpart; batched products do.
        return {"attention": EXECUTORCH_ATTENTION, "form": Form.RESIDENT, "experts": "batched_mm", "adapt": fuse_layers}

    def lower(self, program: Program, folder: Path, options: Mapping[str, Any]) -> list[LoweredFile]:
        if program.batch_size > 1:
            # ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows; rows of their own length need more.
            raise InputError(
                f"batch_size is {program.batch_size}; target 'executorch' takes 1, because its cache writes would copy the "
                "whole cache each step otherwise. Export with batch_size=1, or for target 'pt2'"
            )
        with warnings.catch_warnings():
            # Deprecations inside executorch's own operators and passes, hundreds per export, none of the caller's making.
            warnings.simplefilter("ignore", FutureWarning)
            exported = {name: program.export(name) for name in program.methods}
            lowered = lower_programs(exported)
        with (folder / FILE).open("wb") as file:
            lowered.write_to_file(file)
        return [LoweredFile(FILE, f"methods {', '.join(exported)}, weights, one cache")]

    def open(self, folder: Path, description: ProgramDescription) -> Runner:
        return ExecutorchRunner(folder / FILE, description)
