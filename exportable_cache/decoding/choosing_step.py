"""A decode step that ends in a token instead of in logits: what a compiled loop runs."""

from __future__ import annotations

import torch
from torch import nn

from .sampling import SamplingSettings, draw, penalise, sorted_distribution


class ChoosingStep(nn.Module):
    """A program's step with the choice of the next tokens behind it, without a look at any value.

    Args:
        step: A `ProgramModule` that gives logits [batch, vocab].
        greedy: Take the most probable token, instead of drawing one.
        penalised: Apply the repetition penalty, and count the chosen tokens as seen.
    """

    def __init__(self, step: nn.Module, greedy: bool, penalised: bool) -> None:
        super().__init__()
        self.step = step
        self.inputs = len(step.method.inputs)
        self.greedy = greedy
        self.penalised = penalised

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        """
        Args:
            *arguments: The step's inputs; random numbers [batch] in [0, 1) unless greedy; tokens seen, bool [batch, vocab],
                if penalised, where the chosen tokens are added in place; and the fields of `SamplingSettings`.

        Returns:
            int64 [batch].
        """
        further = list(arguments[self.inputs :])
        logits = self.step(*arguments[: self.inputs])
        uniform = None if self.greedy else further.pop(0)
        seen = further.pop(0) if self.penalised else None
        settings = SamplingSettings(*further)
        if seen is not None:
            logits = penalise(logits, seen, settings.repetition_penalty)
        if uniform is None:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = draw(*sorted_distribution(logits, settings), uniform)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens
