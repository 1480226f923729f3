"""Operators spelled out before lowering, because torch_tensorrt 2.13.0's converters fail on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .kv_cache_update import scatter_update

if TYPE_CHECKING:
    from ...common.compat.torch import OperatorBase


def scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> torch.Tensor:
    """`scatter` of one number as that of a tensor: the converter makes it float64, which TensorRT does not have."""
    return torch.scatter(x, dim, index, torch.full_like(index, value, dtype=x.dtype))


def select_from_end(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """`select` counted from the end of any length, as a slice: the converter gathers at the negative index, which is
    undefined.
    """
    if not isinstance(index, int) or index >= 0:
        return NotImplemented
    return torch.ops.aten.slice.Tensor(x, dim, index, index + 1 or None).squeeze(dim)


def log1p(x: torch.Tensor) -> torch.Tensor:
    """`log1p`, which has no converter, exact to a few roundings where `log(1 + x)` has lost x: the error that the sum
    makes is divided out again.
    """
    near = 1 + x
    is_lost = near == 1
    return torch.where(is_lost, x, torch.log(near) * (x / torch.where(is_lost, torch.ones_like(x), near - 1)))


def broadcast_in_dim(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """The operator of torch's reference reductions, such as `std`, which has no converter: dimension i of `x` becomes
    `dims[i]`.
    """
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def decompositions(in_place: bool) -> dict[OperatorBase, Callable]:
    """What to spell out.

    Args:
        in_place: Leave cache writes as they are, for TensorRT's KVCacheUpdate layer; otherwise they become scatters.
    """
    table: dict[OperatorBase, Callable] = {
        torch.ops.aten.scatter.value: scatter_value,
        torch.ops.aten.select.int: select_from_end,
        torch.ops.aten.log1p.default: log1p,
        torch.ops.prims.broadcast_in_dim.default: broadcast_in_dim,
    }
    return table if in_place else {**table, torch.ops.exportable_cache.kv_cache_update.default: scatter_update}
