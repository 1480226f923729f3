"""Prompts of a batch of equal or different length, and the rows that wait while longer rows are prefilled."""

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
    """Columns of a batch that go through together: the tokens of some rows, while the others wait.

    Attributes:
        start, end: First column, and the one after the last.
        rows: Whether each row has tokens there, bool [batch] on the host.
    """

    start: int
    end: int
    rows: torch.Tensor


@dataclass(frozen=True)
class TokenRows:
    """Prompts that end together: `TokenRows(tensor([[5, 6, 7], [8, 8, 9]]), (3, 2), False)` holds 5 6 7 and 8 9.

    Attributes:
        ids: int64 [batch, length], of several codebooks [batch, length, codebooks], each row's tokens at its end. What
            stands before them is the row's own first token, a valid id, and one that counts as no other in what a
            prompt is said to hold.
        lengths: Tokens of each row.
        are_even: Whether all rows have the same length.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    are_even: bool = True

    @property
    def texts(self) -> list[torch.Tensor]:
        """Tokens of each row, int64 [length], without what stands before them."""
        longest = self.ids.shape[1]
        return [row[longest - length :] for row, length in zip(self.ids, self.lengths, strict=True)]

    def mask_of(self, token: int) -> torch.Tensor:
        """Return True where a prompt has this token, bool [batch, length]; False before a shorter row begins."""
        columns = torch.arange(self.ids.shape[1])[None]
        real = columns >= self.ids.shape[1] - torch.tensor(self.lengths)[:, None]
        return (self.ids == token) & real.to(self.ids.device)

    @classmethod
    def whole(cls, ids: torch.Tensor) -> TokenRows:
        """Rows of equal length, int64 [batch, length]."""
        return cls(ids, (ids.shape[1],) * ids.shape[0])

    @classmethod
    def of(cls, prompts: Sequence[torch.Tensor]) -> TokenRows:
        """From one tensor int64 [length] per row."""
        lengths = tuple(len(prompt) for prompt in prompts)
        if len(set(lengths)) == 1:
            return cls(torch.stack(list(prompts)), lengths)
        longest = max(lengths)
        rows = [torch.cat([prompt[:1].expand(longest - len(prompt), *prompt.shape[1:]), prompt]) for prompt in prompts]
        return cls(torch.stack(rows), lengths, are_even=False)

    @classmethod
    def checked(cls, prompts: Any, attention_mask: Any, limits: ProgramLimits) -> TokenRows:
        """From what a user gives.

        Args:
            prompts: int64 [batch, length], or a list of prompts, each int64 [length] or a list of ints.
            attention_mask: [batch, length], 0 on the padding before or behind each row's tokens; or None.
            limits: What the program takes.

        Raises:
            InputError: If either is not that, a row has no token, or a token is outside the vocabulary.
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
            raise InputError("attention_mask says which columns of a tensor are padding; a list of prompts has none")
        if len(prompts) != limits.batch_size:
            raise InputError(
                f"got a list of {len(prompts)} prompts, this session runs {limits.batch_size} rows; pass one prompt "
                f"per row, or allocate or export with batch_size={len(prompts)}"
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
        """The columns in order, cut wherever a row begins. Rows end together, so the last step gives every row's
        logits.
        """
        longest = self.ids.shape[1]
        starts = torch.tensor([longest - length for length in self.lengths])
        cuts = [*sorted(set(starts.tolist())), longest]
        return [Segment(start, end, starts <= start) for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def _real(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """Which columns hold tokens, bool [batch, length] on the host."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape[:2]:
        given = (
            list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise InputError(
            f"attention_mask has shape {given}, input_ids {list(ids.shape)}; pass the mask that the tokenizer gave "
            "with them"
        )
    real = attention_mask.cpu() != 0
    for row, mask in enumerate(real):
        columns = mask.nonzero()[:, 0].tolist()
        if not columns:
            raise InputError(
                f"attention_mask leaves no token in row {row}: the prompt is empty; pass at least one token"
            )
        if columns[-1] - columns[0] + 1 != len(columns):
            raise InputError(
                f"attention_mask has a gap between the tokens of row {row}; padding goes before or behind a row's "
                "tokens"
            )
    return real


def _as_tensor(name: str, prompt: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(prompt, (list, tuple)) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise InputError(f"{name} is {prompt!r:.60}; pass int64 tensors [length], or lists of token ids")
    return torch.tensor(prompt, dtype=torch.int64, device=device)


class RowsAside:
    """Rows kept in copies while steps run over them at position 0, and put back when it is their turn.

    Args:
        stepper: What runs the steps.
        rows: Which to keep.
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
        """Put back those of `rows`, bool [batch], that are aside."""
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
def set_aside(stepper: ProgramStepper, rows: list[int]) -> Iterator[RowsAside]:
    """Keep rows in copies; those that are not put back inside the block are at its end, whatever ends it."""
    aside = RowsAside(stepper, rows)
    try:
        yield aside
    finally:
        aside.restore(stepper.all_rows)


def rows_to_set_aside(stepper: ProgramStepper, rows: TokenRows) -> list[int]:
    """Rows that wait and would lose what they hold to the steps of longer ones.

    Args:
        stepper: At the place where `rows` are to be fed.
        rows: A prompt.

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
            loses.append(f"there is no room for behind them, of {stepper.max_length} in all")
        if not loses:
            continue
        if state_of(stepper.runner) is None:
            raise InputError(
                f"row {row} holds {held} tokens and waits while a longer row is fed {longest} at once, which "
                f"{loses[0]}, and the {stepper.target!r} runtime does not give out its cache to keep the row apart; "
                "feed every row as many tokens, or reset() and prefill whole sequences"
            )
        found.append(row)
    return found
