"""Attention for TensorRT: one operator with its key heads unexpanded, which becomes TensorRT's own attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ...attention import EXTRAS, matmul_attention
from ...masks import register_masks

TENSORRT_ATTENTION = "exportable_cache_tensorrt"

# What the attention layer cannot express; plain products can.
_PLAIN = (*EXTRAS, "indices")


def tensorrt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`scaled_dot_product_attention` with grouped heads where the model allows, `matmul_attention` elsewhere.

    The plain form is taken for soft-capping, sinks, a position bias, values of another size than keys (MLA), and without a
    mask: TensorRT's layer drops a mask that comes with `causal`, and its causal form knows no cache.

    Args:
        query: [batch, heads, q_length, head_dim].
        key: [batch, kv_heads, kv_length, head_dim].
        value: [batch, kv_heads, kv_length, value_head_dim].
        attention_mask: Additive, [batch or 1, 1 or heads, q_length, kv_length] in the dtype of the query. (A bool one, shared
            by two attentions of dynamic length, fails in TensorRT-RTX 1.5's builder.)
        scaling: Factor on the scores, `head_dim ** -0.5` by default.

    Returns:
        [batch, q_length, heads, value_head_dim], and None for the weights.
    """
    is_plain = attention_mask is None or any(kwargs.get(name) is not None for name in _PLAIN)
    if is_plain or key.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        return matmul_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Stated, not left to the converter, which would compute it from shapes in float32 for every layer.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask.to(query.dtype), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(TENSORRT_ATTENTION, tensorrt_attention)
register_masks(TENSORRT_ATTENTION)
