"""Checks that some operators of torch 2.13 leave out, and read beyond their arguments without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...common.compat.torch import OpOverload
from ...common.compat.torch_distributed import GROUP, is_sum, sum_in_graph

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default


def checked(called: Callable[..., Any]) -> Callable[..., Any]:
    """What a graph calls in place of an operator; the operator itself, if that checks its arguments."""
    if not isinstance(called, OpOverload):
        return called
    return _over_ranks if is_sum(called) else _CHECKED.get(called, called)


def _over_ranks(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    if (operation, group) != ("sum", GROUP):
        raise ValueError(f"{operation!r:.40} over the processes {group!r:.80}, which are not those of the program")
    return sum_in_graph(tensor)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any, **named: Any
) -> torch.Tensor:
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention over {key.shape[-2]} keys and {value.shape[-2]} values")
    return _ATTENTION(query, key, value, *options, **named)


def _pad(tensor: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    if mode != "constant":
        _check_pad(pad)
    return _ATEN.pad.default(tensor, pad, mode, value)


def _replication_pad1d(tensor: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    _check_pad(padding)
    return _ATEN.replication_pad1d.default(tensor, padding)


def _replication_pad2d(tensor: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    _check_pad(padding)
    return _ATEN.replication_pad2d.default(tensor, padding)


def _replication_pad3d(tensor: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    _check_pad(padding)
    return _ATEN.replication_pad3d.default(tensor, padding)


def _check_pad(padding: Sequence[int]) -> None:
    if any(size < 0 for size in padding):
        raise ValueError(f"padding by {list(padding)} with values of the tensor")


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Of these operators, as torch's kernel takes as many lengths as there are directions on trust."""
    # -1 is no dimension there: the length of the whole.
    others = None if dim == -1 else [one for one in range(direction.ndim) if one != dim]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


_CHECKED: dict[OpOverload, Callable[..., torch.Tensor]] = {
    _ATTENTION: _attention,
    _ATEN.pad.default: _pad,
    _ATEN._weight_norm.default: _weight_norm,
    _ATEN.replication_pad1d.default: _replication_pad1d,
    _ATEN.replication_pad2d.default: _replication_pad2d,
    _ATEN.replication_pad3d.default: _replication_pad3d,
}
