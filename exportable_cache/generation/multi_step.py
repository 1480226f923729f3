"""Decoding with several steps per launch, whose tokens are returned one by one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from .sampling import Sampler
    from .stepper import PromptStepper, Stepper


class MultiStepDecoder:
    """Source of the next tokens of one generation, which runs `steps_per_launch` steps at once.

    Between tokens the session's length is that of plain decoding. Tokens computed ahead are dropped at no cost if the
    generation ends or the session is used otherwise.

    Args:
        session: The session that runs the steps.
        sampler: Chooses the tokens.
    """

    def __init__(self, session: Stepper, sampler: Sampler) -> None:
        self.session = session
        self.sampler = sampler
        self._ahead: deque[torch.Tensor] = deque()
        self._moves = session.moves
        self._rollback = session.least_rollback[1]

    def next(self, tokens: torch.Tensor, wanted: int | None, ended: torch.Tensor) -> torch.Tensor:
        """Feed the newest tokens and choose the ones that follow.

        Args:
            tokens: int64 [batch], the newest tokens.
            wanted: Upper bound of the tokens still needed, these included; None if there is none.
            ended: bool [batch] on the CPU, rows that get padding. They are fed too, because a step has all rows, and
                their length is then reset, unless a layer keeps a state or all rows must have one length.

        Returns:
            int64 [batch].
        """
        stays = bool(ended.any()) and self._rollback > 0 and not self.session.equal_rows
        on: int | torch.Tensor = (~ended).to(torch.int64) if stays else 1
        if self._ahead and self.session.moves == self._moves:
            self.session.shift(on)
        elif (equal := self.session.equal_steps(~ended)) == 0:
            self._ahead = deque([self.sampler.choose(self.session.decode_for_generation(tokens, ~ended))])
            self.session.shift(on - 1)
            self._moves = self.session.moves
        else:
            one_by_one = self.session.steps_per_launch == 1 or not self.sampler.chooses_in_graph
            steps = 1 if one_by_one else self._steps(wanted, stays, equal)
            self._ahead = deque(self.session.decode_and_choose(tokens, self.sampler, steps).unbind(1))
            self.session.shift(on - steps)
            self._moves = self.session.moves
        return self._ahead.popleft()

    def _steps(self, wanted: int | None, stays: bool, equal: int) -> int:
        # Single steps near the end, because fewer steps per launch would need another graph.
        steps, room = self.session.steps_per_launch, self.session.room
        if stays and self._rollback < steps:
            # A row that has ended takes back all steps of a launch, one more than a row that ends within it.
            return 1
        return steps if all(limit is None or limit >= steps for limit in (wanted, room, equal)) else 1


def check_steps_per_launch(session: PromptStepper, steps: int) -> None:
    """Check that the session can run `steps` at once and take them back after a stop.

    Raises:
        InputError: If it is not a positive int, exceeds the capacity, or the runtime or a layer does not support it.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InputError(f"steps_per_launch must be an int of at least 1, got {steps!r}")
    if steps == 1:
        return
    if session.max_length is not None and steps > session.max_length:
        raise InputError(
            f"steps_per_launch must be at most {session.max_length}, the tokens a row holds, got {steps}; lower it"
        )
    if not session.stepper.chooses_in_graph:
        raise InputError(
            f"steps_per_launch must be 1 for {session.stepper.target!r} programs, which return logits, got {steps}; "
            "leave it out, or use Session.from_model"
        )
    layer, allowed = session.stepper.least_rollback
    if allowed == 0:
        raise InputError(
            f"steps_per_launch must be 1 for a model with {layer}, whose state cannot be taken back, got {steps}; "
            "leave it out"
        )
    if allowed < steps - 1:
        raise InputError(
            f"steps_per_launch must be at most {allowed + 1}, because {layer} takes back at most {allowed} tokens, got "
            f"{steps}; lower it, or allocate the cache with rollback_slots={steps - 2}"
        )
