"""Decoding with several steps per launch, and decode steps that return chosen tokens instead of logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import InputError
from .sampling import SamplingSettings, choose

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


class Choice(nn.Module):
    """The choice of the next tokens from logits, traceable because it reads no tensor values.

    Args:
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
    """

    def __init__(self, greedy: bool, penalised: bool) -> None:
        super().__init__()
        self.greedy = greedy
        self.penalised = penalised

    def forward(self, logits: torch.Tensor, *further: torch.Tensor) -> torch.Tensor:
        """Choose one token per row.

        Args:
            logits: [batch, vocab].
            *further: Random numbers [batch] in [0, 1) unless greedy; seen tokens, bool [batch, vocab], if penalised,
                which is updated in place; and the fields of `SamplingSettings`.

        Returns:
            int64 [batch].
        """
        left = list(further)
        uniform = None if self.greedy else left.pop(0)
        seen = left.pop(0) if self.penalised else None
        settings = SamplingSettings(*left)
        tokens, _ = choose(logits, settings, uniform, seen)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens


class ChoosingSteps(nn.Module):
    """One or several decode steps followed by the choice of the next tokens, unrolled into one graph.

    Each further step feeds the tokens chosen by the one before, at the next position.

    Args:
        step: A `ProgramModule` of one token that returns logits [batch, vocab].
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
        steps: Number of steps.
        agree: Function that makes the chosen tokens, int64 [batch], equal on all processes of a parallel session.
    """

    def __init__(
        self,
        step: nn.Module,
        greedy: bool,
        penalised: bool,
        steps: int = 1,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.agree = agree
        self.step = step
        self.choose = Choice(greedy, penalised)
        self.inputs = len(cast(Any, step).method.inputs)
        self.steps = steps

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        """Run the steps.

        Args:
            *arguments: The step's inputs, and the arguments of `Choice` after the logits, with random numbers
                [steps, batch].

        Returns:
            int64 [batch, steps].
        """
        input_ids, input_pos, *others = arguments[: self.inputs]
        further = arguments[self.inputs :]
        chosen: list[torch.Tensor] = []
        for index in range(self.steps):
            logits = self.step(input_ids, input_pos, *others)
            tokens = self.choose(logits, *of_step(further, index, self.choose.greedy))
            if self.agree is not None:
                tokens = self.agree(tokens)
            chosen.append(tokens)
            input_ids, input_pos = tokens[:, None], input_pos + 1
        return torch.stack(chosen, dim=1)


def of_step(further: Sequence[torch.Tensor], index: int, greedy: bool) -> list[torch.Tensor]:
    """Return the arguments of the choice in one of several steps, with that step's random numbers."""
    return list(further) if greedy else [further[0][index], *further[1:]]
