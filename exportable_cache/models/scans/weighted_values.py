"""RWKV's weighted mean of values (Peng et al. 2023, arXiv:2305.13048, section 3.1.2), from any initial state."""

from __future__ import annotations

import torch

from .bound import doublings
from .selective import shifted

#: Of the largest exponent where nothing was seen: finite, so that differences are.
_NOTHING = -1e38


def weighted_values(
    decay: torch.Tensor, bonus: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of values, each weighted by `exp(key)` and by `decay` per token since; the newest by `exp(bonus + key)`.

    Sums are kept with the largest exponent taken out of them, so nothing overflows. Computed by doubling, as
    `linear_recurrence`.

    Args:
        decay: Logarithm of what is left of a weight after a token, [channels], negative.
        bonus: [channels].
        key: [batch, length, channels].
        value: [batch, length, channels].
        state: Sum of weighted values, sum of weights, and the exponent taken out of both: [batch, 3, channels]. Zeros
            where nothing was seen.

    Returns:
        Means [batch, length, channels], and the state after the last token.
    """
    key, value = key.float(), value.float()
    # A sum of weights is at least 1 once something was seen.
    before = torch.where(state[:, 1:2] == 0, _NOTHING, state[:, 2:3])
    values, weights, largest = value, torch.ones_like(value), key
    for round_ in range(doublings(key.shape[1])):
        tokens = 2**round_
        values, weights, largest = _joined(
            (shifted(values, tokens, 0.0), shifted(weights, tokens, 0.0), shifted(largest, tokens, _NOTHING)),
            decay * tokens,
            (values, weights, largest),
        )
    seen = torch.arange(1, key.shape[1] + 1, device=key.device)[:, None]
    sums = _joined((state[:, 0:1], state[:, 1:2], before), decay * seen, (values, weights, largest))
    # What each token finds, itself left out.
    found = [
        torch.cat([first, rest], dim=1).narrow(1, 0, key.shape[1])
        for first, rest in zip((state[:, 0:1], state[:, 1:2], before), sums, strict=True)
    ]
    values, weights, _ = _joined((found[0], found[1], found[2]), 0.0, (value, torch.ones_like(value), key + bonus))
    last = torch.cat([one.narrow(1, key.shape[1] - 1, 1) for one in sums], dim=1)
    return values / weights, last


def _joined(
    earlier: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    decay: torch.Tensor | float,
    later: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over two stretches of tokens, each with its exponent; the earlier one is `decay` away."""
    exponent = earlier[2] + decay
    largest = torch.maximum(exponent, later[2])
    left, right = torch.exp(exponent - largest), torch.exp(later[2] - largest)
    return left * earlier[0] + right * later[0], left * earlier[1] + right * later[1], largest
