"""Rows that wait while longer ones of their batch go ahead: every step writes behind each row, whoever it is for.

At position 0 that leaves nothing, as the row starts there. Behind tokens it is overwritten later, and seen by no query,
unless a ring loses what the row still needs, a state moves on, or there is no room: such a row is kept in a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..backends.base import state_of
from ..errors import InputError

if TYPE_CHECKING:
    from .program_stepper import ProgramStepper
    from .token_rows import TokenRows


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
