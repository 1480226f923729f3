"""Decode steps that end in tokens instead of in logits: what a compiled loop runs."""

from __future__ import annotations

import torch
from torch import nn

from .sampling import SamplingSettings, draw, penalise, sorted_distribution


class ChoosingSteps(nn.Module):
    """A program's decode step with the choice of the next tokens behind it, without a look at any value; once, or
    several times.

    Of several steps each feeds the tokens that the one before has chosen, one position further: a loop unrolled into
    one graph.

    Args:
        step: A `ProgramModule` of one token that gives logits [batch, vocab].
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
        steps: How many.
    """

    def __init__(self, step: nn.Module, greedy: bool, penalised: bool, steps: int = 1) -> None:
        super().__init__()
        self.step = step
        self.inputs = len(step.method.inputs)
        self.greedy = greedy
        self.penalised = penalised
        self.steps = steps

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        """
        Args:
            *arguments: The step's inputs; random numbers [steps, batch] in [0, 1) unless greedy; tokens seen, bool
                [batch, vocab], if penalised, where the chosen tokens are added in place; and the fields of
                `SamplingSettings`.

        Returns:
            int64 [batch, steps].
        """
        further = list(arguments[self.inputs :])
        input_ids, input_pos, *others = arguments[: self.inputs]
        uniform = None if self.greedy else further.pop(0)
        seen = further.pop(0) if self.penalised else None
        settings = SamplingSettings(*further)
        chosen: list[torch.Tensor] = []
        for index in range(self.steps):
            logits = self.step(input_ids, input_pos, *others)
            if seen is not None:
                logits = penalise(logits, seen, settings.repetition_penalty)
            if uniform is None:
                tokens = logits.argmax(dim=-1)
            else:
                tokens = draw(*sorted_distribution(logits, settings), uniform[index])
            if seen is not None:
                seen.scatter_(1, tokens[:, None], True)
            chosen.append(tokens)
            input_ids, input_pos = tokens[:, None], input_pos + 1
        return torch.stack(chosen, dim=1)
