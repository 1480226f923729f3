"""Checks that some operators of torch 2.13 leave out: their kernels read beyond their arguments, divide with a signal,
or take any time without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...common.compat.torch import OpOverload, operator_arguments
from ...common.compat.torch_distributed import GROUP, is_sum, sum_in_graph
from .tensors import check_view

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
#: The most parts that one operator may cut a tensor into.
_MOST_PARTS = 1 << 16
_LARGEST_SCALE = 1e4

_Operator = Callable[..., Any]


def checked(called: _Operator) -> _Operator:
    """Return what a graph calls in place of an operator: the operator itself, if that checks its arguments."""
    if not isinstance(called, OpOverload):
        return called
    if is_sum(called):
        return _over_ranks
    replaced = _REPLACED.get(called)
    if replaced is not None:
        return replaced
    check = _CHECKS.get(called.overloadpacket)
    return called if check is None else _after(check, called)


def _after(check: Callable[[OpOverload, dict[str, Any]], None], called: OpOverload) -> _Operator:
    """Return an operator that is called after a check of its arguments, which the check takes by their names.

    The function keeps its own name and module. By those of the operator, generated code would call the operator itself.
    """
    names = [argument.name for argument in operator_arguments(called)]

    def checks_and_calls(*args: Any, **kwargs: Any) -> Any:
        check(called, {**dict(zip(names, args, strict=False)), **kwargs})
        return called(*args, **kwargs)

    return checks_and_calls


def _over_ranks(tensor: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    if (operation, group) != ("sum", GROUP):
        raise ValueError(f"{operation!r:.40} over the processes {group!r:.80}, which are not those of the program")
    return sum_in_graph(tensor)


def _check_attention(called: OpOverload, given: dict[str, Any]) -> None:
    key, value = given["key"], given["value"]
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention over {key.shape[-2]} keys and {value.shape[-2]} values")


def _check_pad(called: OpOverload, given: dict[str, Any]) -> None:
    if given.get("mode", "constant") != "constant" and any(size < 0 for size in given["pad"]):
        raise ValueError(f"padding by {list(given['pad'])} with values of the tensor")


def _check_quotient(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse the least integer divided by -1, whose quotient no register holds: the processor sends SIGFPE."""
    dividend, divisor = given["self"], given["other"]
    if isinstance(divisor, int | float) and divisor != -1:
        return
    dtype = torch.result_type(dividend, divisor)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return
    is_minus_one = torch.as_tensor(divisor) == -1
    if is_minus_one.any() and (is_minus_one & (torch.as_tensor(dividend) == torch.iinfo(dtype).min)).any():
        raise ValueError(f"{called} of {torch.iinfo(dtype).min} by -1 does not fit in {dtype}")


def _check_parts(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse to cut a tensor into more views than any program uses."""
    tensor, dim = given["self"], given.get("dim", 0)
    if not isinstance(tensor, torch.Tensor) or not -tensor.ndim <= dim < tensor.ndim:
        return  # torch says what is wrong
    whole, size = tensor.shape[dim], given.get("split_size", 1)
    parts = given.get("chunks", math.ceil(whole / size) if isinstance(size, int) and size > 0 else 1)
    if parts > _MOST_PARTS:
        raise ValueError(f"{called} gives {parts} parts, of at most {_MOST_PARTS}")


def _check_scales(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse scales that are far from any: kernels compute from them which elements they read."""
    for scale in given.get("scale_factors") or ():
        if not 1 / _LARGEST_SCALE <= scale <= _LARGEST_SCALE:
            raise ValueError(f"{called} by a scale of {scale}")


def _check_no_scales(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse scales beside a size, from which antialiased kernels compute an index of their weights unchecked."""
    if any(given.get(name) is not None for name in ("scales_h", "scales_w", "scale_factors")):
        raise ValueError(f"{called} must be given a size alone, got scales")


def _check_modes(called: OpOverload, given: dict[str, Any]) -> None:
    """Refuse numbers that are no mode of a grid sampler, whose kernels leave their results as they are for others."""
    modes = (given.get("interpolation_mode"), given.get("padding_mode"))
    if not all(mode in (0, 1, 2) for mode in modes):
        raise ValueError(f"{called} must be given modes from 0 to 2, got {modes}")


def _cleared(called: OpOverload) -> _Operator:
    """Return an operator with zeros in place of fresh memory, which may hold secrets, or bools of other bytes."""

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return called(*args, **kwargs).zero_()

    return zeros


def _viewed(called: OpOverload) -> _Operator:
    """Return an operator whose views claim no more elements than a computer goes through in seconds."""

    def view(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = called(tensor, *args, **kwargs)
        for one, base in zip(result, tensor, strict=True) if isinstance(result, list) else ((result, tensor),):
            check_view(one.shape, base.numel())
        return result

    return view


def _weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Compute a weight norm of other operators, because torch's kernel does not compare the number of lengths with the
    number of directions.
    """
    # -1 is no dimension there: the length of the whole.
    others = None if dim == -1 else [one for one in range(direction.ndim) if one != dim]
    return direction * (length / torch.linalg.vector_norm(direction, dim=others, keepdim=True))


_CHECKS: dict[Any, Callable[[OpOverload, dict[str, Any]], None]] = {
    _ATEN.scaled_dot_product_attention: _check_attention,
    _ATEN.pad: _check_pad,
    **dict.fromkeys(
        (_ATEN.div, _ATEN.div_, _ATEN.floor_divide, _ATEN.floor_divide_, _ATEN.remainder, _ATEN.remainder_),
        _check_quotient,
    ),
    **dict.fromkeys((_ATEN.unbind, _ATEN.split, _ATEN.chunk), _check_parts),
    **dict.fromkeys(
        (
            _ATEN.upsample_linear1d,
            _ATEN.upsample_nearest1d,
            _ATEN.upsample_nearest2d,
            _ATEN.upsample_bilinear2d,
            _ATEN.upsample_bicubic2d,
        ),
        _check_scales,
    ),
    _ATEN.grid_sampler: _check_modes,
    **{getattr(_ATEN, name): _check_no_scales for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")},
}
_REPLACED: dict[OpOverload, _Operator] = {
    _ATEN._weight_norm.default: _weight_norm,
    **{
        called: _cleared(called)
        for called in (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default)
    },
    **{
        called: _viewed(called)
        for called in (
            _ATEN.expand.default,
            _ATEN.expand_as.default,
            _ATEN.broadcast_to.default,
            _ATEN.broadcast_tensors.default,
            _ATEN.unfold.default,
        )
    },
}
