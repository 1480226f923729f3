"""Kernels that a program calls, against those that the runtime has: a file that no runtime can load is not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import executorch.extension.llm.custom_ops.custom_ops  # registers torch.ops.llama, here and in the runtime
import executorch.kernels.quantized  # noqa: F401  registers quantized_decomposed::*

from ...common.compat.executorch import operator_names
from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager


def check_kernels(lowered: ExecutorchProgramManager) -> None:
    """Refuse a program that calls an operator which neither a delegate took nor the runtime has a kernel for.

    Raises:
        UnsupportedModelError: With the names of such operators.
    """
    called = {
        f"{operator.name}.{operator.overload}".rstrip(".")
        for plan in lowered.executorch_program.execution_plan
        for operator in plan.operators
    }
    missing = sorted(called - operator_names())
    if missing:
        raise UnsupportedModelError(
            f"the ExecuTorch runtime has no kernel for {', '.join(missing)}; export for target 'pt2' instead"
        )
