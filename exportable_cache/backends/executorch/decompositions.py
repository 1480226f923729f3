"""Operators spelled out before lowering, because a kernel of the runtime computes them otherwise than torch does."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ...common.compat.torch import OperatorBase


def tanh_gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """`gelu(x, approximate="tanh")` from elementary operators; other forms are left alone.

    ExecuTorch 1.4.1's XNNPACK delegate drops `approximate` and evaluates the exact form: up to 4.7e-4 off per element,
    which Gemma 2 and 3 carry into their logits.
    """
    if approximate != "tanh":
        return NotImplemented
    return 0.5 * x * (1.0 + torch.tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)))


TABLE: dict[OperatorBase, Callable] = {torch.ops.aten.gelu.default: tanh_gelu}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Apply `TABLE` where the program uses one of its operators; other programs are returned as they are."""
    used = {node.target for node in program.graph.nodes if node.op == "call_function"}
    return program.run_decompositions(TABLE) if used & TABLE.keys() else program
