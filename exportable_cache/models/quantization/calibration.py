"""Rounding of weights to 4 bits in groups, and calibration on a text, whose rounding makes up for errors (GPTQ).

The usual scale is a group's largest magnitude divided by 7.5. Integers from -8 to 7 then clip that weight if it is
positive. In a trained model this costs more accuracy than rounding (docs/benchmarks.md, "Accuracy of 4 bits"). So the
scale of least squared error among a few candidates is chosen.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ...common.process.tuning import one_thread
from ...errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


#: Tokens of a sequence, and limits of the tokens of a text. A longer text is cut.
_LENGTH, _LEAST_TOKENS, _MOST_TOKENS = 128, 512, 16384
# Characters of a text that are tokenized until there are enough tokens; the last is the limit of those that are read.
_CHARACTERS = tuple(each * _MOST_TOKENS for each in (4, 8, 16, 32))
#: One sequence in so many is held out, to measure what calibration gains on text that it has not seen.
_HELD_OUT_EVERY = 8
# Bytes of the products of the layers that one pass over the text measures; a larger layer is measured alone.
_BYTES_AT_ONCE = 1 << 30


class Products(NamedTuple):
    """Sums of the products of a layer's inputs, float64 [inputs, inputs], over the tokens of two parts of a text.

    Attributes:
        of_text: Products over the tokens that rounding is fitted to.
        held_out: Products over the other tokens.
    """

    of_text: torch.Tensor
    held_out: torch.Tensor


class Effect(NamedTuple):
    """Distance of layers' outputs from those of the float weights on held-out text, relative to their magnitude.

    Attributes:
        before: Root mean square with weights that are rounded to nearest, the mean over layers.
        after: The same with the weights that are stored.
        layers: Number of layers whose weights were calibrated; the others gain nothing and are rounded to nearest.
    """

    before: float
    after: float
    layers: int


@dataclass
class Calibration:
    """A text as a model's tokens, and what the calibration of a model found.

    Attributes:
        sequences: Tokens, int64 [1, length] each.
    """

    sequences: Sequence[torch.Tensor]
    _found: list[tuple[float, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(one.numel() for one in self.sequences)

    @property
    def sha256(self) -> str:
        """Digest of the tokens."""
        return hashlib.sha256(torch.cat(list(self.sequences), dim=1).numpy().tobytes()).hexdigest()

    @property
    def effect(self) -> Effect | None:
        """Effect on the layers that were rounded so far, or None if there are none."""
        if not self._found:
            return None
        before, after = (sum(one) / len(self._found) for one in zip(*self._found, strict=True))
        return Effect(before, after, sum(after < before for before, after in self._found))

    def better(
        self, weight: torch.Tensor, products: Products, plain: RoundedGroups, fitted: RoundedGroups
    ) -> RoundedGroups:
        """Return the rounding whose outputs are nearer to the float weight's on held-out text, and record both."""
        energy = _energy(weight, products.held_out)
        errors = [
            (_energy(weight, products.held_out, one) / energy) ** 0.5 if energy else 0.0 for one in (plain, fitted)
        ]
        is_better = errors[1] < errors[0]
        self._found.append((errors[0], min(errors)))
        return fitted if is_better else plain


def read_calibration(path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase | None) -> Calibration:
    """Read the start of a text, and split it into sequences of tokens.

    Raises:
        InputError: If it cannot be read, is too short, or there is no tokenizer.
    """
    ids = tokens_of_text(path, tokenizer, "calibrate", _LEAST_TOKENS)
    lengths = [_LENGTH] * (len(ids) // _LENGTH)
    # A short rest is part of the sequence before it, because a few tokens held out would decide for all layers.
    if (rest := len(ids) % _LENGTH) < _LENGTH // 2:
        lengths[-1] += rest
    else:
        lengths.append(rest)
    return Calibration(torch.tensor([ids], dtype=torch.int64).split(lengths, dim=1))


def tokens_of_text(
    path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase | None, name: str, least: int
) -> list[int]:
    """Return the tokens of the start of a text, at most 16,384.

    Args:
        path: File of the text.
        tokenizer: The model's tokenizer, or None.
        name: Argument that names the file, for errors.
        least: Fewest tokens.

    Raises:
        InputError: If it cannot be read, is too short, or there is no tokenizer.
    """
    if tokenizer is None:
        raise InputError(f"{name} needs a tokenizer, and the model has none; pass tokenizer=, or leave {name} out")
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_CHARACTERS[-1])
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} must be a text in UTF-8: cannot read {str(path)!r}: {error}") from error
    ids: list[int] = []
    for size in _CHARACTERS:
        # Without a warning that the text is longer than the model's context, because it is cut.
        ids = tokenizer(text[:size], verbose=False)["input_ids"]
        # One sequence more than the limit, because a cut of the text changes its last tokens.
        if size >= len(text) or len(ids) >= _MOST_TOKENS + _LENGTH:
            break
    ids = ids[:_MOST_TOKENS]
    if len(ids) < least:
        raise InputError(
            f"{name} must be a text of at least {least} tokens, got {len(ids)} in {str(path)!r}; pass a longer "
            f"text of the kind that the model is used for (up to {_MOST_TOKENS:,} tokens are read)"
        )
    return ids


class _Reached(Exception):
    """Signal that all layers of a group have their inputs, so that later layers need not be computed."""


@torch.no_grad()
def products_of(
    model: PreTrainedModel, paths: Sequence[str], calibration: Calibration
) -> Iterator[tuple[str, Products | None]]:
    """Yield the products of the inputs of linear layers, in the order of the paths; None for those of no token.

    Each pass over the text measures as many layers as `_BYTES_AT_ONCE` holds.

    Raises:
        UnsupportedModelError: If the model cannot be run on tokens alone, or an input is not finite.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"calibrate is not supported by encoder-decoders such as {type(model).__name__}, whose encoder needs "
            "another input; leave it out"
        )
    groups: list[list[str]] = []
    size = 0
    for path in paths:
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        size += 16 * linear.in_features**2
        if not groups or size > _BYTES_AT_ONCE:
            groups.append([])
            size = 16 * linear.in_features**2
        groups[-1].append(path)
    for group in groups:
        found = _measured(model, group, calibration.sequences)
        for path in group:
            yield path, found.pop(path, None)


def _measured(model: PreTrainedModel, paths: Sequence[str], sequences: Sequence[torch.Tensor]) -> dict[str, Products]:
    found: dict[str, Products] = {}
    calls: Counter[str] = Counter()
    waiting: set[str] = set()
    # The last input with its products, because queries, keys and values read the same one.
    last: tuple[torch.Tensor | None, str] = (None, "")
    held_out = False

    def note(path: str, rows: torch.Tensor) -> None:
        nonlocal last
        source, waiting_for = last[0], len(waiting)
        waiting.discard(path)
        calls[path] += 1
        if source is rows and (path not in found or found[path] is found[last[1]]):
            found[path] = found[last[1]]
        else:
            if path not in found:
                empty = torch.zeros(2, rows.shape[-1], rows.shape[-1], dtype=torch.double)
                found[path] = Products(*empty)
            plain = rows.flatten(0, -2).cpu().double()
            if not plain.isfinite().all():
                raise UnsupportedModelError(
                    f"the inputs of {path} of {type(model).__name__} must be finite on the calibration text, got "
                    "infinities or not-a-number; load the model in float32, or load its weights again"
                )
            found[path][held_out].addmm_(plain.T, plain)
            last = (rows, path)
        if waiting_for and not waiting:
            raise _Reached

    def hooked(path: str) -> torch.utils.hooks.RemovableHandle:
        return model.get_submodule(path).register_forward_pre_hook(lambda _, inputs: note(path, inputs[0]))

    hooks = [hooked(path) for path in paths]
    try:
        for index, ids in enumerate(sequences):
            held_out = index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 or (index == len(sequences) - 1 and index < 7)
            # The first pass is whole. Later ones end early unless a layer may be called again, or for the first time.
            if index and all(calls[path] == index for path in paths):
                waiting |= set(paths)
            try:
                model(input_ids=ids.to(model.device), use_cache=False)
            except _Reached:
                pass
            last = (None, "")
            waiting.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _energy(weight: torch.Tensor, products: torch.Tensor, rounded: RoundedGroups | None = None) -> float:
    """Return the sum of squares of the outputs of a weight, or of its difference from a rounded one."""
    total, products = 0.0, products.float()
    rows = max(1, (1 << 24) // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        some = weight[start : start + rows].float().cpu()
        if rounded is not None:
            integers, scales = (part[start : start + rows].float() for part in rounded)
            some = some - integers * scales.repeat_interleave(integers.shape[1] // scales.shape[1], 1)
        total += float(((some @ products) * some).sum(dtype=torch.double))
    return total
