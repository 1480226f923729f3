"""Decode steps of groups of rows that overlap: a group's next one begins while other groups' are under way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..backends.base import OverlapsSteps
from .checks import check_room

if TYPE_CHECKING:
    import torch

    from ..backends.base import BegunStep
    from .program_stepper import ProgramStepper


class RowGroups:
    """The groups of a session, each a range of rows; none where all rows take a step together. For decoding loops.

    Args:
        stepper: Of the session.
    """

    def __init__(self, stepper: ProgramStepper) -> None:
        self._stepper = stepper

    def __iter__(self) -> Iterator[range]:
        runner = self._stepper.runner
        return iter(runner.row_groups if isinstance(runner, OverlapsSteps) else ())

    def begin(self, tokens: torch.Tensor, rows: range) -> BegunStep:
        """`decode` of one group, as far as this process's part of it goes.

        Ranks compare nothing here, which would have each wait for all: the tokens follow from logits that all got.

        Args:
            tokens: int64 [len(rows)], taken as they are.
            rows: The group, of which no other step is under way.

        Raises:
            CacheFullError: If a row has no slot left.
        """
        stepper = self._stepper
        check_room(int(stepper.state.length[rows.start : rows.stop].max()), stepper.max_length, 1)
        return stepper.begin(tokens, rows)

    def finish(self, begun: BegunStep) -> torch.Tensor:
        """Logits [len(rows), vocab] of the step that was begun first."""
        return self._stepper.finish(begun)
