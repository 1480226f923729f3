"""The halves that rotary embeddings swap as a product with a constant, so that the rotation stays inside the XNNPACK
delegate.

XNNPACK takes no slices of a tensor of dynamic length. Left as it is, the rotation leaves the delegate in every layer,
between the projections and the attention: for four slices, of a few numbers each where one token is fed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .graph_edits import calls_to_linear

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

# The end of a slice that goes to the end.
_END = 2**63 - 1


def rotations_to_linear(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 `cat([-x[..., n:], x[..., :n]], -1)` of a static size 2 n as `linear(x, rotation(2 n))`, in
    place.

    The result is the same to the bit for finite numbers: every sum has one term that is not zero.
    """
    return calls_to_linear(program, "rotation_of", _rotated, rotation)


def rotation(size: int) -> torch.Tensor:
    """The matrix R float32 [size, size] with `x @ R.T == cat([-x[size // 2:], x[:size // 2]])`, of an even size."""
    half = size // 2
    matrix = torch.zeros(size, size)
    indices = torch.arange(half)
    matrix[indices, half + indices] = -1.0
    matrix[half + indices, indices] = 1.0
    return matrix


def _rotated(node: Node) -> Node | None:
    """The tensor whose halves a call swaps, None if it does something else."""
    if node.target is not torch.ops.aten.cat.default or len(node.args[0]) != 2:
        return None
    value, dim = node.meta["val"], node.args[1] if len(node.args) > 1 else 0
    negated, first = node.args[0]
    size = value.shape[-1]
    if (
        value.dtype != torch.float32
        or dim not in (-1, value.dim() - 1)
        or negated.target is not torch.ops.aten.neg.default
    ):
        return None
    second = negated.args[0]
    if not isinstance(size, int) or _bounds(first) != (0, size // 2) or _bounds(second) != (size // 2, size):
        return None
    source = first.args[0]
    return source if source is second.args[0] and source.meta["val"].shape[-1] == size else None


def _bounds(node: Node) -> tuple[int, int] | None:
    """Where a slice of step 1 over the last dimension begins and ends, None of anything else."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return None
    source, dim, start, end, step = (*node.args, *(0, 0, _END, 1)[len(node.args) - 1 :])
    shape = source.meta["val"].shape
    return (start, min(end, shape[-1])) if step == 1 and dim in (-1, len(shape) - 1) else None
