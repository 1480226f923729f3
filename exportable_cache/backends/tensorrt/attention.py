"""Attention for TensorRT: one operator with unexpanded key heads, which becomes TensorRT's attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ...cache.attention.functions import EXTRAS, SELECTIONS, matmul_attention
from ...cache.attention.masks import register_masks

TENSORRT_ATTENTION = "exportable_cache_tensorrt"

_SINKS = ("s_aux", "sinks")

# Arguments that the attention layer cannot express, but `matmul_attention` can.
_PLAIN = tuple(name for name in (*EXTRAS, *SELECTIONS) if name not in _SINKS)


def tensorrt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with `scaled_dot_product_attention` over grouped heads if possible, else with `matmul_attention`.

    Two features are passed through the mask, because the layer has no other input for them:

    - sinks: they are the scores of the null slot that the cache layer keeps after the others;
    - if values are shorter than keys (MLA), the scores of the dimensions that only keys have, because the layer
      requires both to have one shape ("Key and Value must have the same shape").

    `matmul_attention` serves soft-capping, a position bias, values longer than keys, and calls without a mask: the
    layer drops a mask that comes with `causal`, and its causal form does not know a cache.

    Args:
        module: Attention module of the model.
        query: [batch, heads, q_length, head_dim].
        key: [batch, kv_heads, kv_length, head_dim]; with a null slot (`EngineLayout`), kv_length + 1.
        value: [batch, kv_heads, kv_length, value_head_dim], likewise.
        attention_mask: Additive, [batch or 1, 1 or heads, q_length, kv_length] in the dtype of the query. (A bool mask
            shared by two attentions of dynamic length fails in TensorRT-RTX 1.5's builder.)
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        **kwargs: See `matmul_attention`.

    Returns:
        [batch, q_length, heads, value_head_dim], and None for the weights.
    """
    sinks = sinks_of(query, kwargs)
    lacks_slot = sinks is not None and attention_mask is not None and key.shape[2] != attention_mask.shape[-1] + 1
    if lacks_slot or not is_expressible(query, key, value, attention_mask, kwargs):
        return matmul_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Passed, because the converter would otherwise compute it from shapes in float32 for every layer.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert attention_mask is not None
    mask = attention_mask.to(query.dtype)
    if sinks is not None:
        mask = torch.cat([mask.expand(*sinks.shape[:3], mask.shape[-1]), sinks.to(query.dtype)], dim=-1)
    if key.shape[-1] > value.shape[-1]:
        mask = mask + _scores(query[..., value.shape[-1] :] * scale, key[..., value.shape[-1] :])
        # Clamped, because the lowest float16 plus a negative score is -inf, from which kernels compute NaN.
        mask = mask.clamp(min=torch.finfo(mask.dtype).min)
        query, key = query[..., : value.shape[-1]], key[..., : value.shape[-1]]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


def is_expressible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    extras: Mapping[str, Any],
) -> bool:
    """Return True if TensorRT's attention layer can compute this attention, given a null slot for sinks."""
    is_plain = any(extras.get(name) is not None for name in _PLAIN)
    return attention_mask is not None and not is_plain and value.shape[-1] <= key.shape[-1] == query.shape[-1]


def sinks_of(query: torch.Tensor, extras: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the sink logits of a call, [batch, heads, q_length, 1], or None."""
    given = next((extras[name] for name in _SINKS if extras.get(name) is not None), None)
    if given is None or given.dim() == 4:
        return given
    return given.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Multiply grouped heads: [batch, heads, q, dim] and [batch, kv_heads, kv, dim] -> [batch, heads, q, kv]."""
    batch, heads, length, dim = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * length, dim)
    return (folded @ key.transpose(2, 3)).reshape(batch, heads, length, key.shape[2])


AttentionInterface.register(TENSORRT_ATTENTION, tensorrt_attention)
register_masks(TENSORRT_ATTENTION)
