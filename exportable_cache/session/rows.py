"""Prompts of a batch, whose rows may differ in length, and copies of rows that wait for longer ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..backends.base import state_of
from ..errors import InputError
from .checks import check_ids

if TYPE_CHECKING:
    from .checks import ProgramLimits
    from .stepper import ProgramStepper


@dataclass(frozen=True)
class Segment:
    """Columns of a batch that are fed together: tokens of some rows, while the others wait.

    Attributes:
        start: First column.
        end: Column after the last.
        rows: True for rows that have tokens there, bool [batch] on the host.
    """

    start: int
    end: int
    rows: torch.Tensor


@dataclass(frozen=True)
class TokenRows:
    """Prompts aligned at their ends: `TokenRows(tensor([[5, 6, 7], [8, 8, 9]]), (3, 2), False)` holds 5 6 7 and 8 9.

    Attributes:
        ids: int64 [batch, length], or [batch, length, codebooks], with each row's tokens at its end. The padding is
            the row's first token, because it must be a valid id that occurs in the prompt anyway.
        lengths: Number of tokens in each row.
        are_even: True if all rows have the same length.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    are_even: bool = True

    @property
    def texts(self) -> list[torch.Tensor]:
        """Tokens of each row, int64 [length], without the padding."""
        longest = self.ids.shape[1]
        return [row[longest - length :] for row, length in zip(self.ids, self.lengths, strict=True)]

    def mask_of(self, token: int) -> torch.Tensor:
        """Return True where a prompt has this token, bool [batch, length]; False before a shorter row begins."""
        columns = torch.arange(self.ids.shape[1])[None]
        real = columns >= self.ids.shape[1] - torch.tensor(self.lengths)[:, None]
        return (self.ids == token) & real.to(self.ids.device)

    @classmethod
    def whole(cls, ids: torch.Tensor) -> TokenRows:
        """Return rows of equal length, from int64 [batch, length]."""
        return cls(ids, (ids.shape[1],) * ids.shape[0])

    @classmethod
    def of(cls, prompts: Sequence[torch.Tensor]) -> TokenRows:
        """Return rows from one tensor int64 [length] each."""
        lengths = tuple(len(prompt) for prompt in prompts)
        if len(set(lengths)) == 1:
            return cls(torch.stack(list(prompts)), lengths)
        longest = max(lengths)
        rows = [torch.cat([prompt[:1].expand(longest - len(prompt), *prompt.shape[1:]), prompt]) for prompt in prompts]
        return cls(torch.stack(rows), lengths, are_even=False)

    @classmethod
    def checked(cls, prompts: Any, attention_mask: Any, limits: ProgramLimits) -> TokenRows:
        """Check the prompts of a user, and return their rows.

        Args:
            prompts: int64 [batch, length], or a list of prompts, each int64 [length] or a list of ints.
            attention_mask: [batch, length], 0 on the padding before or after each row's tokens; or None.
            limits: Limits of the program.

        Raises:
            InputError: If either is not valid, a row has no token, or a token is outside the vocabulary.
        """
        if isinstance(prompts, (list, tuple)):
            return cls._from_list(prompts, attention_mask, limits)
        check_ids("input_ids", prompts, limits.dims("batch", "length"), limits)
        if attention_mask is None:
            return cls(prompts, (prompts.shape[1],) * prompts.shape[0])
        real = _real(attention_mask, prompts)
        if bool(real.all()):
            return cls.whole(prompts)
        return cls.of([row[mask] for row, mask in zip(prompts, real.to(prompts.device), strict=True)])

    @classmethod
    def _from_list(cls, prompts: Sequence[Any], attention_mask: Any, limits: ProgramLimits) -> TokenRows:
        if attention_mask is not None:
            raise InputError("attention_mask must be None for a list of prompts, which have no padding; leave it out")
        if len(prompts) != limits.batch_size:
            raise InputError(
                f"a list of prompts must have one per row, {limits.batch_size}, got {len(prompts)}; pass "
                f"{limits.batch_size} prompts, or allocate or export with batch_size={len(prompts)}"
            )
        rows = []
        for index, prompt in enumerate(prompts):
            name = f"prompt {index} of the list"
            if not isinstance(prompt, torch.Tensor):
                prompt = _as_tensor(name, prompt, limits.device)
            check_ids(name, prompt, limits.dims("length"), limits)
            rows.append(prompt)
        return cls.of(rows)

    def segments(self) -> list[Segment]:
        """Return the columns in order, cut where a row begins.

        Rows end together, so the last step gives the logits of every row.
        """
        longest = self.ids.shape[1]
        starts = torch.tensor([longest - length for length in self.lengths])
        cuts = [*sorted(set(starts.tolist())), longest]
        return [Segment(start, end, starts <= start) for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def _real(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return True for columns that hold tokens, bool [batch, length] on the host."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape[:2]:
        given = (
            list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise InputError(
            f"attention_mask must have the shape of input_ids, {list(ids.shape[:2])}, got {given}; pass the mask that "
            "the tokenizer gave with them"
        )
    real = attention_mask.cpu() != 0
    for row, mask in enumerate(real):
        columns = mask.nonzero()[:, 0].tolist()
        if not columns:
            raise InputError(
                f"attention_mask must leave at least one token in each row, got none in row {row}: the prompt is empty"
            )
        if columns[-1] - columns[0] + 1 != len(columns):
            raise InputError(
                f"attention_mask must be 0 only before or after the tokens of a row, got a gap in row {row}; remove it"
            )
    return real


def _as_tensor(name: str, prompt: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(prompt, (list, tuple)) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise InputError(f"{name} must be an int64 tensor [length] or a list of token ids, got {prompt!r:.60}")
    return torch.tensor(prompt, dtype=torch.int64, device=device)


class SavedRows:
    """Copies of rows that would be overwritten while longer rows of the batch are still being prefilled.

    The rows are at position 0 until `restore` puts their copies back.

    Args:
        stepper: Runs the steps.
        rows: Indices of the rows to save.
    """

    def __init__(self, stepper: ProgramStepper, rows: list[int]) -> None:
        self._stepper = stepper
        self._rows = torch.zeros_like(stepper.all_rows)
        self._rows[rows] = True
        self._held = stepper.state
        state = (state_of(stepper.runner) or {}) if rows else {}
        self._copies = {row: {name: tensor[row].clone() for name, tensor in state.items()} for row in rows}
        stepper.state = replace(self._held, length=self._held.length * ~self._rows)

    def restore(self, rows: torch.Tensor) -> None:
        """Restore those of `rows`, bool [batch], that are saved."""
        due = self._rows & rows
        if not bool(due.any()):
            return
        state = state_of(self._stepper.runner) or {}
        for row in due.nonzero()[:, 0].tolist():
            for name, tensor in state.items():
                tensor[row].copy_(self._copies[row][name])
        now = self._stepper.state
        self._stepper.state = replace(now, length=torch.where(due, self._held.length, now.length))
        self._rows = self._rows & ~due


@contextmanager
def saved_rows(stepper: ProgramStepper, rows: list[int]) -> Iterator[SavedRows]:
    """Save rows, and restore at the end of the block those that were not restored inside it."""
    saved = SavedRows(stepper, rows)
    try:
        yield saved
    finally:
        saved.restore(stepper.all_rows)


def rows_to_save(stepper: ProgramStepper, rows: TokenRows) -> list[int]:
    """Return the rows that wait and would lose tokens to the steps of longer rows.

    Args:
        stepper: Runs the steps.
        rows: The prompt to be fed next.

    Raises:
        InputError: If there are any and the runtime does not give out its cache.
    """
    if not stepper.state.has_begun:
        return []
    found = []
    segments = rows.segments()
    for row, held in enumerate(stepper.state.length.tolist()):
        waits = [
            size
            for segment in segments
            if not segment.rows[row]
            for size in stepper.chunk_sizes(segment.end - segment.start)
        ]
        if not held or not waits:
            continue
        longest = max(waits)
        end = held + longest
        ever = max(end, int(stepper.state.max_len_ever[row]))
        loses = [
            f"layer {index} ({layer.label}) cannot take back"
            for index, layer in enumerate(stepper.layers)
            if layer.max_rollback(end, ever) < longest
        ]
        if stepper.max_length is not None and end > stepper.max_length:
            loses.append(f"does not fit after them, of {stepper.max_length} in all")
        if not loses:
            continue
        if state_of(stepper.runner) is None:
            raise InputError(
                f"row {row} holds {held} tokens and waits while a longer row is fed {longest} at once, which "
                f"{loses[0]}, and the {stepper.target!r} runtime does not give out its cache to save the row; feed "
                "every row the same number of tokens, or reset() and prefill whole sequences"
            )
        found.append(row)
    return found
