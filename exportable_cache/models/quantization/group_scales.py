"""Integers and scales of 4-bit weights in groups: of a few scales the one with the least squared error.

The usual scale is a group's largest magnitude over 7.5. Integers of -8 to 7 then cut off that very weight where it is
positive, which shrinks what a row adds up: of a trained model that costs more than the rounding itself would
(docs/benchmarks.md, "Accuracy of 4 bits").
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...common.process.tuning import one_thread

if TYPE_CHECKING:
    from ...common.fs.tensor_files import Scratch

#: What a group's largest magnitude is divided by, to be a scale. More of them and finer ones gain less than 1 %.
_STEPS_OF_LARGEST = (7.5, 7.0, 8.0, 8.5, 9.0)
_LEAST, _MOST = -8, 7
#: Kernels refuse a scale of zero, and one that is not normal.
_LEAST_SCALE = torch.finfo(torch.float32).smallest_normal
# Of a weight: few enough for a processor's last cache, and so many that threads seldom wait for the interpreter's lock,
# which each of some 70 operators asks for: two threads take a quarter more at 1 << 18, three times as long at 1 << 16.
_ELEMENTS_AT_ONCE = 1 << 19


class RoundedGroups(NamedTuple):
    """A weight [rows, columns] in groups of a row's neighbours.

    Attributes:
        integers: int8 [rows, columns], of -8 to 7.
        scales: [rows, groups]; a weight is its integer times its group's scale.
    """

    integers: torch.Tensor
    scales: torch.Tensor


def round_groups(
    weight: torch.Tensor, group_size: int, dtype: torch.dtype, signed: bool = False, scratch: Scratch | None = None
) -> RoundedGroups:
    """Round a weight, some rows at a time in as many threads as torch has.

    Args:
        weight: Of any float dtype, [rows, columns].
        group_size: Weights that share a scale; it divides the columns.
        dtype: Of the scales. Errors are those with scales of that dtype.
        signed: Scales may be negative, so that the largest magnitude can be -8 steps whatever its sign: a tenth less
            error (of a normal distribution 8.1 % in groups of 32, in place of 8.6). XNNPACK takes positive ones only.
        scratch: Where the integers are to lie; None for memory.

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

    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(round_some, range(0, rows, at_once)):
            pass
    return RoundedGroups(integers, scales)


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
    # For the integers of the best of them another scale may be better, and give other integers again.
    integers = _integers(groups, scale, tried)
    products, squares = (integers * groups).sum(1, keepdim=True), integers.square().sum(1, keepdim=True)
    scale, _ = _better(groups, scale, error, _representable(products / squares, dtype), tried)
    integers = _integers(groups, scale, tried).to(torch.int8).view(weight.shape)
    if sign is not None:
        scale = scale * sign
    return RoundedGroups(integers, scale.to(dtype).view(weight.shape[0], -1))


def _representable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a file has it, in float32."""
    return scale.clamp(min=_LEAST_SCALE).to(dtype).float()


def _integers(groups: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return torch.mul(groups, 1 / scale, out=into).round_().clamp_(_LEAST, _MOST)


def _error(groups: torch.Tensor, scale: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    return _integers(groups, scale, into).mul_(scale).sub_(groups).square_().sum(1, keepdim=True)


def _better(
    groups: torch.Tensor, scale: torch.Tensor, error: torch.Tensor, candidate: torch.Tensor, into: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    its_error = _error(groups, candidate, into)
    # False for not-a-number, which a group of zeros gives.
    better = its_error < error
    return torch.where(better, candidate, scale), torch.where(better, its_error, error)
