"""How one generation chooses its tokens: settings, the random sequence, and what has been seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from .sampling import draw, penalise, sorted_distribution

if TYPE_CHECKING:
    from .checkpoint_settings import RowRules
    from .sampling import Sampling


class Sampler:
    """`Sampling` at work on the rows of one generation.

    Args:
        sampling: How to choose.
        input_ids: The prompt, int64 [batch, length]; its tokens count as seen.
        vocab_size: Columns of the logits.
        agree: What makes of a tensor that which all processes of a parallel session go on with.
        rules: What the checkpoint asks of the choice; the repetition penalty is among it.
    """

    def __init__(
        self,
        sampling: Sampling,
        input_ids: torch.Tensor,
        vocab_size: int,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        rules: RowRules | None = None,
    ) -> None:
        device = input_ids.device
        self.agree = agree
        self.sampling = sampling
        self.settings = sampling.settings(device)
        self.generator = sampling.generator(device)
        self._rules = rules
        #: bool [batch, vocab], or None where nothing depends on it.
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty not in (None, 1) and rules is None:
            self.seen = torch.zeros(input_ids.shape[0], vocab_size, dtype=torch.bool, device=device).scatter_(
                1, input_ids, True
            )

    @property
    def chooses_in_graph(self) -> bool:
        """True if a graph of a decode step can choose the tokens as well: the checkpoint's rules run outside of one."""
        return self._rules is None

    def choose(
        self, logits: torch.Tensor, allowed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Choose the next tokens, int64 [batch], from logits [batch, vocab]; they count as seen from now on.

        Args:
            allowed: Sets the logits of tokens that may not come to minus infinity. It comes before the checkpoint's
                rules: where these leave none of its tokens, they do not count.

        Raises:
            InputError: If the rules leave no token.
        """
        tokens = self.sampling.choose(self._allowed(logits, allowed), self.generator, self.seen)
        if self.agree is not None:
            tokens = self.agree(tokens)
        self.see(tokens)
        return tokens

    def agreed(self, tokens: list[int], most: int) -> list[int]:
        """Of lists that processes have chosen, at most `most` tokens each, the one that all go on with."""
        if self.agree is None:
            return tokens
        sent = torch.tensor(
            [len(tokens), *tokens, *[0] * (most - len(tokens))], device=self.settings.temperature.device
        )
        count, *agreed = self.agree(sent).tolist()
        return agreed[:count]

    def ruled(self, scores: torch.Tensor) -> torch.Tensor:
        """Return logits or log probabilities [batch, vocab] as the rules and the repetition penalty leave them."""
        if self._rules is not None:
            return self._rules(scores)
        return scores if self.seen is None else penalise(scores, self.seen, self.settings.repetition_penalty)

    def _allowed(
        self, logits: torch.Tensor, allowed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the logits as the rules leave them, which have a token that may come in each row."""
        if self._rules is None:
            return logits if allowed is None else allowed(logits)
        ruled = self._rules(logits)
        if allowed is not None:
            both = allowed(ruled)
            return allowed(logits) if bool(both.isneginf().all()) else both
        if bool(ruled.isneginf().all(dim=-1).any()):
            raise InputError(
                "the generation config of the checkpoint leaves no token that may come next; correct "
                "generation_config.json, or set the fields of session.generation_config that rule out tokens"
            )
        return ruled

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i go on from what row `rows[i]`, int64 [batch], has seen; the rows have had one prompt."""
        if self._rules is not None:
            self._rules.reorder(rows)
        if self.seen is not None:
            self.seen = self.seen[rows]

    def see(self, tokens: torch.Tensor) -> None:
        """Count tokens, int64 [batch], as seen."""
        if self._rules is not None:
            self._rules.see(tokens)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)

    def uniform(self, rows: int, steps: int = 1) -> torch.Tensor:
        """The next random numbers in [0, 1), float32 [steps, rows]: the same for several steps as for one after the
        other.
        """
        # One call per step: on a GPU a generator asked for many numbers at once gives others than asked for them in
        # turn.
        device = self.settings.temperature.device
        return torch.stack([torch.rand(rows, generator=self.generator, device=device) for _ in range(steps)])

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities [batch, vocab] that the next tokens are drawn from, in the order of the vocabulary.

        Greedy choice is the distribution that gives one token all of it.
        """
        logits = self._allowed(logits)
        if self.seen is not None:
            logits = penalise(logits, self.seen, self.settings.repetition_penalty)
        if self.sampling.is_greedy:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        probabilities, tokens = sorted_distribution(logits, self.settings)
        return torch.zeros_like(probabilities).scatter_(1, tokens, probabilities)

    def draw_from(self, probabilities: torch.Tensor) -> int:
        """One token drawn from probabilities [vocab] that need not sum to one."""
        return int(draw(*probabilities[None].sort(dim=-1, descending=True, stable=True), self.uniform(1)[0])[0])
