"""Choosing the next token of each row from its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import InputError


def check_seed(seed: int) -> None:
    """Refuse what torch's generators do not take as a seed.

    Raises:
        InputError: If it is no int, or outside of -2**63 to 2**64 - 1.
    """
    if not _is_int(seed) or not -(2**63) <= seed < 2**64:
        raise InputError(f"seed is {seed!r}; it must be an int of at most 64 bits, from {-(2**63)} to {2**64 - 1}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; checked when it is made.

    `Sampling()` is greedy, `Sampling(temperature=0.7, top_p=0.9, seed=1)` draws from the tokens that make up nine tenths of
    the probability, the same ones every time.

    Attributes:
        temperature: Divisor of the logits; 0 takes the most probable token.
        top_k: Draw from the k most probable tokens; None for all.
        top_p: Draw from the fewest most probable tokens whose probabilities reach p; None for all. After `top_k`.
        seed: Of the draws; None goes on with torch's global generator.

    Raises:
        InputError: If a value is out of range, or `top_k` or `top_p` is given where nothing is drawn.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise InputError(f"temperature is {self.temperature!r}; it must be a number of at least 0 (0 is greedy)")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise InputError(f"top_k is {self.top_k!r}; it must be an int of at least 1, or None for all tokens")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InputError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1, or None for all tokens")
        if self.seed is not None:
            check_seed(self.seed)
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise InputError(
                f"temperature is 0, which is greedy and ignores top_k={self.top_k} and top_p={self.top_p}; "
                "pass a temperature above 0, or leave both out"
            )

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """A generator at the start of the seed's sequence, or None without a seed."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def choose(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The next tokens, int64 [batch], from logits [batch, vocab]."""
        return sample(logits, self.temperature, self.top_k, self.top_p, generator)


def sample(
    logits: torch.Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: [batch, vocab], any floating dtype.
        temperature, top_k, top_p: See `Sampling`.
        generator: Source of the draws, on the device of `logits`; torch's global one by default.

    Returns:
        int64 [batch].
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    # The largest logit goes to zero first, and stays there under any divisor whose inverse is finite in float32; others may
    # become minus infinity, which is greedy. A smaller temperature would count as zero, and zero by zero is not a number.
    divisor = max(temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / divisor
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1, generator=generator)[:, 0]


def keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Logits [batch, vocab] with all but the `top_k` largest of each row at minus infinity."""
    kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)


def keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits [batch, vocab] with all but the fewest largest whose probabilities reach `top_p` at minus infinity."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    # A token stays while those before it have not reached top_p, so the first always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
