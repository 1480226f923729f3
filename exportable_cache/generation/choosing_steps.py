"""Decode steps that return chosen tokens instead of logits, for compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from .sampling import SamplingSettings, choose


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
