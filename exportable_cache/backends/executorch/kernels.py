"""Kernels that a program calls, against those that the runtime has: a file that no runtime can load is not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.compat.executorch import operator_names, register_fused_operators, register_quantized_operators
from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

register_fused_operators()
register_quantized_operators()


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
