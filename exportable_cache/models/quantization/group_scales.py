"""Rounding of weights to 4 bits in groups, with the scale of least squared error among a few candidates.

The usual scale is a group's largest magnitude divided by 7.5. Integers from -8 to 7 then clip that weight if it is
positive. In a trained model this costs more accuracy than rounding (docs/benchmarks.md, "Accuracy of 4 bits").
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...common.process.tuning import one_thread

if TYPE_CHECKING:
    from ...common.fs.tensor_files import Scratch

#: Divisors of a group's largest magnitude that give candidate scales. More of them gain less than 1 %.
_STEPS_OF_LARGEST = (7.5, 7.0, 8.0, 8.5, 9.0)
_LEAST, _MOST = -8, 7
# Weights rounded at once: few enough for the processor's last cache, and enough that threads rarely wait for the
# interpreter's lock. Two threads take 25 % longer with 1 << 18, and three times as long with 1 << 16.
_ELEMENTS_AT_ONCE = 1 << 19


# Share of the mean square of inputs that is added to each, so that few tokens do not determine all weights.
_DAMPING = 0.01
# Rows that are rounded together with error feedback. Any number of threads rounds as many, so that sums are the same.
_ROWS_WITH_FEEDBACK = 256


class RoundedGroups(NamedTuple):
    """A weight [rows, columns] rounded in groups of neighbouring columns.

    Attributes:
        integers: int8 [rows, columns], from -8 to 7.
        scales: [rows, groups]; a weight is its integer times its group's scale.
    """

    integers: torch.Tensor
    scales: torch.Tensor


def round_groups(
    weight: torch.Tensor, group_size: int, dtype: torch.dtype, signed: bool = False, scratch: Scratch | None = None
) -> RoundedGroups:
    """Round a weight to 4 bits, with as many threads as torch uses.

    Args:
        weight: Weight of any float dtype, [rows, columns].
        group_size: Weights that share a scale; it divides the columns.
        dtype: Dtype of the scales; squared errors are computed with scales of that dtype.
        signed: True to allow negative scales, so that the largest magnitude can always be -8 steps. For a normal
            distribution in groups of 32 the error is 8.1 % instead of 8.6 %. XNNPACK takes positive scales only.
        scratch: File storage for the integers; None for memory.

    Raises:
        OSError: If the disk has no room for them.
    """
    weight = weight.detach()
    rows, columns = weight.shape
    integers = (
        torch.empty(rows, columns, dtype=torch.int8) if scratch is None else scratch.empty(weight.shape, torch.int8)
    )
    scales = torch.empty(rows, columns // group_size, dtype=dtype)
    at_once = max(1, _ELEMENTS_AT_ONCE // columns)

    def round_some(start: int) -> None:
        some = slice(start, start + at_once)
        integers[some], scales[some] = _rounded(weight[some].float(), group_size, dtype, signed)

    _in_threads(round_some, range(0, rows, at_once))
    return RoundedGroups(integers, scales)


def round_with_feedback(
    weight: torch.Tensor, group_size: int, dtype: torch.dtype, signed: bool, products: torch.Tensor
) -> RoundedGroups | None:
    """Round columns in order, and change the later ones to make up for the error (https://arxiv.org/abs/2210.17323).

    Args:
        weight: See `round_groups`, which chooses the scale of each group when its first column is reached.
        group_size: See `round_groups`.
        dtype: See `round_groups`.
        signed: See `round_groups`.
        products: float64 [columns, columns], sums of the products of inputs over tokens.

    Returns:
        The rounded weight; None if the inputs are zeros.
    """
    rows, columns = weight.shape
    diagonal = products.diagonal()
    damped = products + torch.eye(columns, dtype=products.dtype) * (_DAMPING * diagonal.mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return None
    factor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
    integers = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // group_size, dtype=dtype)

    def round_some(first: int) -> None:
        some = slice(first, first + _ROWS_WITH_FEEDBACK)
        left = weight.detach()[some].to("cpu", torch.float32, copy=True)
        for start in range(0, columns, group_size):
            end = start + group_size
            group = left[:, start:end].contiguous()
            scales[some, start // group_size] = _rounded(group, group_size, dtype, signed).scales[:, 0]
            scale = scales[some, start // group_size].float()
            errors = torch.empty_like(group)
            for column in range(group_size):
                whole = (group[:, column] / scale).round_().clamp_(_LEAST, _MOST)
                integers[some, start + column] = whole.to(torch.int8)
                row = factor[start + column, start + column : end]
                errors[:, column] = (group[:, column] - whole * scale) / row[0]
                group[:, column:] -= errors[:, column, None] * row
            left[:, end:] -= errors @ factor[start:end, end:]

    _in_threads(round_some, range(0, rows, _ROWS_WITH_FEEDBACK))
    return RoundedGroups(integers, scales)


def _in_threads(function: Callable[[int], None], starts: range) -> None:
    """Call a function with each start, in as many threads as torch uses."""
    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, starts):
            pass


def _rounded(weight: torch.Tensor, group_size: int, dtype: torch.dtype, signed: bool) -> RoundedGroups:
    groups = weight.reshape(-1, group_size)
    lowest, highest = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    largest = torch.maximum(-lowest, highest)
    sign = None
    if signed:
        sign = torch.where(highest > -lowest, -1.0, 1.0)
        groups = groups * sign
    tried = torch.empty_like(groups)
    scale = _representable(largest / _STEPS_OF_LARGEST[0], dtype)
    error = _error(groups, scale, tried)
    for steps in _STEPS_OF_LARGEST[1:]:
        scale, error = _better(groups, scale, error, _representable(largest / steps, dtype), tried)
    # Because the best scale for these integers may be another one, which can in turn give other integers.
    integers = _integers(groups, scale, tried)
    products, squares = (integers * groups).sum(1, keepdim=True), integers.square().sum(1, keepdim=True)
    scale, _ = _better(groups, scale, error, _representable(products / squares, dtype), tried)
    integers = _integers(groups, scale, tried).to(torch.int8).view(weight.shape)
    if sign is not None:
        scale = scale * sign
    return RoundedGroups(integers, scale.to(dtype).view(weight.shape[0], -1))


def _representable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a scale rounded to the dtype of the file, in float32."""
    # Clamped, because kernels reject scales that are zero or subnormal.
    return scale.clamp(min=torch.finfo(dtype).smallest_normal).to(dtype).float()


def _integers(groups: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return torch.mul(groups, 1 / scale, out=into).round_().clamp_(_LEAST, _MOST)


def _error(groups: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return _integers(groups, scale, into).mul_(scale).sub_(groups).square_().sum(1, keepdim=True)


def _better(
    groups: torch.Tensor, scale: torch.Tensor, error: torch.Tensor, candidate: torch.Tensor, into: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    its_error = _error(groups, candidate, into)
    # False for NaN, which a group of zeros gives.
    better = its_error < error
    return torch.where(better, candidate, scale), torch.where(better, its_error, error)
