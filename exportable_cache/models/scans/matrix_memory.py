"""The matrix memory of xLSTM (Beck et al. 2024, arXiv:2405.04517, section 2.3), from any initial state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


class MemoryState(NamedTuple):
    """What a matrix memory keeps: zeros before the first token.

    Attributes:
        memory: Sum of weighted products of keys and values, [batch, heads, key_dim, value_dim].
        normalizer: Sum of weighted keys, [batch, heads, key_dim].
        largest: The exponent taken out of both, [batch, heads, 1].
    """

    memory: torch.Tensor
    normalizer: torch.Tensor
    largest: torch.Tensor


def matrix_memory(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    state: MemoryState,
    eps: float,
) -> tuple[torch.Tensor, MemoryState]:
    """`C[t] = f[t] C[t-1] + i[t] k[t] v[t]`, `n[t] = f[t] n[t-1] + i[t] k[t]`, `h = q C / max(|q n|, 1)`.

    All tokens are one chunk: attention with gates between them, and one product for what the state gave before.
    Exponents are taken out of the sums as the sequential form takes them, so that `eps` weighs the same.

    Args:
        query: [batch, heads, length, key_dim].
        key: [batch, heads, length, key_dim].
        value: [batch, heads, length, value_dim].
        gates: Input gate i, an exponent, and forget gate f before its sigmoid, [batch, heads, length] each.
        state: Before the first token.
        eps: Added to the denominator.

    Returns:
        h [batch, heads, length, value_dim] in float32, and the state after the last token.
    """
    query, key, value = query.float() * query.shape[-1] ** -0.5, key.float(), value.float()
    length = query.shape[2]
    entered = gates[0].float()[:, :, None, :]
    total = F.logsigmoid(gates[1].float()).cumsum(-1)[..., None]
    at = torch.arange(length, device=query.device)
    later = at[:, None] < at[None, :]
    # Exponent of what each token, a column, has left at each later one, a row.
    between = (total - total.transpose(-1, -2) + entered).masked_fill(later, float("-inf"))
    carried = total + state.largest[..., None]
    largest = torch.maximum(carried, between.amax(-1, keepdim=True))
    between, carried = torch.exp(between - largest), torch.exp(carried - largest)
    weights = (query @ key.transpose(-1, -2)) * between
    numerator = weights @ value + carried * (query @ state.memory)
    norm = weights.sum(-1, keepdim=True) + carried * (query @ state.normalizer[..., None])
    output = numerator / (torch.maximum(norm.abs(), torch.exp(-largest)) + eps)
    kept, left = carried.narrow(2, length - 1, 1), between.narrow(2, length - 1, 1)
    weighted = key * left.transpose(-1, -2)
    return output, MemoryState(
        kept * state.memory + weighted.transpose(-1, -2) @ value,
        kept[..., 0] * state.normalizer + weighted.sum(2),
        largest.narrow(2, length - 1, 1)[..., 0],
    )
