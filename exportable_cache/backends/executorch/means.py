"""Means over the last dimension as products with a constant, so that RMSNorm stays inside the XNNPACK delegate.

XNNPACK takes no mean over one dimension. Left as it is, every RMSNorm cuts the graph in two around a portable kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .graph_edits import calls_to_linear

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


def means_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `mean(x, -1, keepdim=True)` of a static size n as `linear(x, full([1, n], 1 / n))`, in
    place.
    """
    return calls_to_linear(program, "mean_over", _averaged, lambda size: torch.full((1, size), 1.0 / size))


def _averaged(node: Node) -> Node | None:
    """The tensor that is averaged over its last dimension, None if a call does something else."""
    if node.target is not torch.ops.aten.mean.dim or "dtype" in node.kwargs or len(node.args) != 3:
        return None
    source, dims, keepdim = node.args
    value = source.meta["val"]
    is_last = value.dim() > 1 and list(dims) in ([-1], [value.dim() - 1]) and isinstance(value.shape[-1], int)
    return source if keepdim and is_last and value.dtype == torch.float32 else None
