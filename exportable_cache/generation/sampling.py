"""Sampling of the next tokens: settings, repetition penalty, random numbers, and the choice itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError, NonFiniteLogitsError
from .sampling_options import SamplingOptions

if TYPE_CHECKING:
    from .checkpoint_settings import RowRules


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """Settings for choosing tokens, and the choice.

    `Sampling()` is greedy. `Sampling(temperature=0.7, top_p=0.9, seed=1)` draws reproducibly from the tokens that make
    up nine tenths of the probability.
    """

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """Return a generator at the start of the seed's sequence, or None without a seed."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def settings(self, device: torch.device | str = "cpu") -> SamplingSettings:
        """Return the settings as tensors, so that one graph serves all values."""
        tiniest = torch.finfo(torch.float32).tiny
        values = (max(self.temperature, tiniest), self.top_p or 1.0, self.min_p or 0.0, self.repetition_penalty or 1.0)
        # Larger than any vocabulary if there is no limit.
        top_k = torch.tensor(2**31 if self.top_k is None else min(self.top_k, 2**31), device=device)
        temperature, *rest = (torch.tensor(value, dtype=torch.float32, device=device) for value in values)
        return SamplingSettings(temperature, top_k, *rest)

    def choose(
        self,
        logits: torch.Tensor,
        generator: torch.Generator | None = None,
        seen: torch.Tensor | None = None,
        settings: SamplingSettings | None = None,
    ) -> torch.Tensor:
        """Choose the next tokens.

        Args:
            logits: [batch, vocab].
            generator: Random generator on the device of `logits`; torch's global one by default.
            seen: bool [batch, vocab], tokens of the prompt and the generation so far, for the repetition penalty.
            settings: Result of `settings`, for callers that keep it.

        Returns:
            int64 [batch].

        Raises:
            NonFiniteLogitsError: If a row's largest logit is not finite.
        """
        uniform = None
        if not self.is_greedy:
            uniform = torch.rand(logits.shape[0], generator=generator, device=logits.device)
        tokens, largest = choose(logits, settings or self.settings(logits.device), uniform, seen)
        # Checking the largest is enough, because NaN is the largest of all.
        if not bool(largest.isfinite().all()):
            raise NonFiniteLogitsError("logits are not finite")
        return tokens


class SamplingSettings(NamedTuple):
    """`Sampling` as 0-D tensors, so that one graph serves all settings: float32, but `top_k` int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor


def choose(
    logits: torch.Tensor,
    settings: SamplingSettings,
    uniform: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next token of each row; eager and compiled steps both do it here, without a branch on data.

    Args:
        logits: [batch, vocab].
        settings: Sampling settings as tensors.
        uniform: Random numbers [batch] in [0, 1); None for the most probable token.
        seen: Tokens that the repetition penalty applies to, bool [batch, vocab]; None for no penalty.

    Returns:
        Tokens int64 [batch], and the largest logit of each row [batch].
    """
    if seen is not None:
        logits = penalise(logits, seen, settings.repetition_penalty)
    largest, tokens = logits.max(dim=-1)
    if uniform is not None:
        tokens = draw(*sorted_distribution(logits, settings), uniform)
    return tokens, largest


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones by it.

    This is the penalty of CTRL (Keskar et al. 2019, section 4.1), as transformers applies it.

    Args:
        logits: [batch, vocab].
        seen: bool [batch, vocab].
        penalty: 0-D; 1 has no effect.
    """
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits).to(logits.dtype)


def sorted_distribution(logits: torch.Tensor, settings: SamplingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities to draw from, most probable first.

    Args:
        logits: [batch, vocab], any floating dtype.
        settings: See `Sampling`; `top_k` applies first, then `top_p`, then `min_p`.

    Returns:
        Probabilities float32 [batch, vocab] that sum to one, and the tokens they belong to, int64 [batch, vocab].
    """
    ordered, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    # The largest logit goes to zero first, and stays there under any divisor whose inverse is finite in float32; others
    # may become minus infinity, which is greedy.
    probabilities = ((ordered - ordered[:, :1]) / settings.temperature).softmax(dim=-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = _renormalised(probabilities, rank < settings.top_k)
    # A token stays while those before it have not reached top_p, so the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < settings.top_p) | (rank == 0)
    return _renormalised(probabilities, kept & (probabilities >= settings.min_p * probabilities[:, :1])), tokens


def _renormalised(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    probabilities = torch.where(kept, probabilities, 0.0)
    return probabilities / probabilities.sum(dim=-1, keepdim=True)


def draw(probabilities: torch.Tensor, tokens: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by the inverse of the cumulative distribution; the random number is an input.

    Args:
        probabilities: [batch, vocab], most probable first.
        tokens: Tokens that they belong to, int64 [batch, vocab].
        uniform: [batch], in [0, 1).

    Returns:
        int64 [batch].
    """
    # Clamped, because rounding may leave the sum below one, and a token of probability zero must not be chosen.
    cumulative = probabilities.cumsum(dim=-1)
    index = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(dim=-1)
    last = ((probabilities > 0).sum(dim=-1) - 1).clamp(min=0)
    return tokens.gather(-1, torch.minimum(index, last)[:, None])[:, 0]


def sample(logits: torch.Tensor, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    """Choose one token per row: int64 [batch] from logits [batch, vocab]; `options` are those of `Sampling`."""
    return Sampling(**options).choose(logits, generator)


class TokenBias:
    """Additions to the logits of one row, as OpenAI's API has them.

    Args:
        bias: Numbers to be added, by token id.
        presence: Number that is subtracted for a token that was seen.
        frequency: Number that is subtracted each time that a token was seen.
    """

    def __init__(self, bias: Mapping[int, float], presence: float, frequency: float) -> None:
        self._bias, self._presence, self._frequency = bias, presence, frequency
        self._counts: dict[int, int] = {}

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [1, vocab] with the additions."""
        added = dict(self._bias)
        for token, count in self._counts.items():
            added[token] = added.get(token, 0.0) - self._presence - count * self._frequency
        if not added:
            return logits
        tokens = torch.tensor([[*added]], device=logits.device)
        return logits.scatter_add(1, tokens, logits.new_tensor([[*added.values()]]))

    def see(self, token: int) -> None:
        """Count a generated token."""
        self._counts[token] = self._counts.get(token, 0) + 1


class Sampler:
    """State of the choice of tokens for the rows of one generation.

    Args:
        sampling: The settings.
        input_ids: The prompt, int64 [batch, length]; its tokens count as seen.
        vocab_size: Number of logits.
        agree: Function that makes a tensor equal on all processes of a parallel session.
        rules: Rules of the checkpoint's generation config, with the repetition penalty.
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
        #: True if a graph can choose the tokens, because there are no checkpoint rules, which run outside graphs.
        self.chooses_in_graph = rules is None
        #: bool [batch, vocab], or None if it is not needed.
        self.seen: torch.Tensor | None = None
        if sampling.repetition_penalty not in (None, 1) and rules is None:
            self.seen = torch.zeros(input_ids.shape[0], vocab_size, dtype=torch.bool, device=device).scatter_(
                1, input_ids, True
            )

    def choose(
        self, logits: torch.Tensor, allowed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Choose the next tokens, int64 [batch], and count them as seen.

        Args:
            logits: [batch, vocab].
            allowed: Function that sets the logits of forbidden tokens to minus infinity. If the checkpoint's rules
                exclude all tokens that it allows, the rules are ignored.

        Raises:
            InputError: If the rules leave no token.
        """
        if allowed is not None or self._rules is not None:
            logits = self._allowed(logits, allowed)
        tokens = self.sampling.choose(logits, self.generator, self.seen, self.settings)
        if self.agree is not None:
            tokens = self.agree(tokens)
        self.see(tokens)
        return tokens

    def agreed(self, tokens: list[int], most: int) -> list[int]:
        """Return the list of at most `most` tokens that all processes of a parallel session use."""
        if self.agree is None:
            return tokens
        sent = torch.tensor(
            [len(tokens), *tokens, *[0] * (most - len(tokens))], device=self.settings.temperature.device
        )
        count, *agreed = self.agree(sent).tolist()
        return agreed[:count]

    def ruled(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the rules and the repetition penalty to logits or log probabilities [batch, vocab]."""
        if self._rules is not None:
            return self._rules(scores)
        return scores if self.seen is None else penalise(scores, self.seen, self.settings.repetition_penalty)

    def _allowed(
        self, logits: torch.Tensor, allowed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Apply the rules to the logits, and check that each row has a token left."""
        if allowed is not None:
            found = allowed(logits if self._rules is None else self._rules(logits))
            if self._rules is not None and bool(found.isneginf().all()):
                found = allowed(logits)
            if bool(found.isneginf().all()):
                raise InputError(
                    "the constraint allows no token that the program computes logits of; pass another constraint, or "
                    "export with a larger vocabulary"
                )
            return found
        if self._rules is None:
            return logits
        ruled = self._rules(logits)
        if bool(ruled.isneginf().all(dim=-1).any()):
            raise InputError(
                "the generation config of the checkpoint excludes every token; correct generation_config.json, or "
                "change the fields of session.generation_config that exclude tokens"
            )
        return ruled

    def reorder(self, rows: torch.Tensor) -> None:
        """Give row i the seen tokens of row `rows[i]`, int64 [batch]; all rows have the same prompt."""
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
        """Return the next random numbers in [0, 1), float32 [steps, rows], equal to those of single steps."""
        # One call per step, because on a GPU one call for many numbers gives different ones.
        device = self.settings.temperature.device
        return torch.stack([torch.rand(rows, generator=self.generator, device=device) for _ in range(steps)])

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [batch, vocab] of the next tokens; greedy choice gives one token probability 1."""
        logits = self._allowed(logits)
        if self.seen is not None:
            logits = penalise(logits, self.seen, self.settings.repetition_penalty)
        if self.sampling.is_greedy:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        probabilities, tokens = sorted_distribution(logits, self.settings)
        return torch.zeros_like(probabilities).scatter_(1, tokens, probabilities)

    def draw_from(self, probabilities: torch.Tensor) -> int:
        """Draw one token from probabilities [vocab] that need not sum to one."""
        return int(draw(*probabilities[None].sort(dim=-1, descending=True, stable=True), self.uniform(1)[0])[0])
