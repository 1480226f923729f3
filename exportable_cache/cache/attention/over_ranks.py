"""Attention over a cache whose full layers have their slots on several processes, under a name of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from ...errors import UnsupportedModelError
from ..context_ranks import taken
from . import RANKS_ATTENTION
from .functions import by_group, fused_attention, refuse_unknown, scores_of, with_addend


def attention_over_ranks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """`fused_attention`, of keys that are a part merged with those of the other ranks.

    Args:
        query: [batch, heads, q_length, head_dim].
        key: [batch, kv_heads, kv_length, head_dim].
        value: [batch, kv_heads, kv_length, value_head_dim].
        attention_mask: Additive or bool, broadcastable to [batch, heads, q_length, kv_length].
        **how: See `fused_attention`; position biases and chosen keys are refused over a part.

    Returns:
        [batch, q_length, heads, value_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: If there is an argument that is not merged.
    """
    ranks = taken(key)
    if ranks is None:
        return fused_attention(module, query, key, value, attention_mask, **how)
    known = ("scaling", "softcap", "s_aux", "sinks", "dropout", "is_causal")
    refuse_unknown(module, {name: given for name, given in how.items() if name not in known})
    if attention_mask is None or how.get("position_bias") is not None:
        raise UnsupportedModelError(
            "attention over a context that is split over ranks needs a mask of positions, and knows no position bias; "
            "allocate the cache without split_context"
        )
    batch, heads, q_length, _ = query.shape
    kv_heads = key.shape[1]
    scores = with_addend(scores_of(query, key, how.get("scaling"), how.get("softcap")), attention_mask)
    sinks, by_head = how.get("sinks"), how.get("s_aux")
    if by_head is not None:
        sinks = by_head.reshape(1, heads, 1, 1).expand(batch, -1, q_length, 1)
    if sinks is not None:
        sinks = by_group(sinks, kv_heads, heads // kv_heads)
    output = ranks.attended(scores, value[:, :, None], sinks).to(query.dtype)
    return output.reshape(batch, heads, q_length, value.shape[-1]).transpose(1, 2).contiguous(), None


def register_over_ranks() -> None:
    """Register it with transformers; its mask function is that of all our attention."""
    AttentionInterface.register(RANKS_ATTENTION, attention_over_ranks)
