"""Several decode steps per launch: computed together, given out one by one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from .loop import PromptStepper, Stepper
    from .sampling import Sampler


class MultiStepDecoder:
    """The next tokens of one generation, from as many steps per launch as the session makes.

    Between tokens the session's length is that of plain decoding: the cache is ahead of it, so what was computed and is
    not wanted costs nothing to drop. A step taken with the session meanwhile does so.

    Args:
        session: What runs the steps.
        sampler: How to choose.
    """

    def __init__(self, session: Stepper, sampler: Sampler) -> None:
        self.session = session
        self.sampler = sampler
        self._ahead: deque[torch.Tensor] = deque()
        self._moves = session.moves
        self._rollback = session.least_rollback[1]

    def next(self, tokens: torch.Tensor, wanted: int | None, ended: torch.Tensor) -> torch.Tensor:
        """Feed `tokens`, int64 [batch], the newest that were given out, and choose the ones that follow, int64 [batch].

        Args:
            wanted: How many more, these included, will be asked for at most; None for any number.
            ended: bool [batch] on the host, rows whose tokens are padding. They are fed like the others, as a step has
                all rows, and their length goes back to where it was, unless a layer keeps a state or rows must be of
                one length.
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
        # Not fewer per launch near the end, which would be a graph of its own: one by one there.
        steps, room = self.session.steps_per_launch, self.session.room
        if stays and self._rollback < steps:
            # A row that stays takes back all steps of a launch, one more than a row that ends within it.
            return 1
        return steps if all(limit is None or limit >= steps for limit in (wanted, room, equal)) else 1


def check_steps_per_launch(session: PromptStepper, steps: int) -> None:
    """Refuse a number of steps that this session could not take at once, or not take back after a stop.

    Raises:
        InputError: If it is no positive int, is more than the cache holds, or the runtime or a layer rules it out.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InputError(f"steps_per_launch is {steps!r}; it must be an int of at least 1")
    if steps == 1:
        return
    if session.max_length is not None and steps > session.max_length:
        raise InputError(f"steps_per_launch is {steps}, a row holds {session.max_length} tokens; pass fewer steps")
    if not session.stepper.chooses_in_graph:
        raise InputError(
            f"steps_per_launch must be 1 for a {session.stepper.target!r} program, which gives logits and leaves the "
            f"choice of tokens to the caller, got {steps}; leave it out, or use Session.from_model"
        )
    layer, allowed = session.stepper.least_rollback
    if allowed == 0:
        raise InputError(
            f"{layer} keeps a state that cannot be taken back, as it must be where an answer ends within a launch of "
            f"{steps} steps; leave out steps_per_launch"
        )
    if allowed < steps - 1:
        raise InputError(
            f"a launch of {steps} steps takes back up to {steps - 1} tokens, {layer} at most {allowed}; "
            f"allocate the cache with rollback_slots={steps - 2}, or pass steps_per_launch={allowed + 1}"
        )
