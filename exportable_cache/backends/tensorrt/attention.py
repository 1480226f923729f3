"""Attention for TensorRT: one operator with its key heads unexpanded, which becomes TensorRT's own attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ...attention import EXTRAS, matmul_attention
from ...masks import register_masks

TENSORRT_ATTENTION = "exportable_cache_tensorrt"

# Of float16, see `_trips_the_builder`.
_MOST_KEYS_OF_ONE_QUERY = 512

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
    mask = attention_mask.to(query.dtype)
    doubled = _trips_the_builder(query, key)
    if doubled:
        query, mask = torch.cat([query, query], dim=2), torch.cat([mask, mask], dim=2)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    if doubled:
        output = output[:, :, :1]
    return output.transpose(1, 2).contiguous(), None


def _trips_the_builder(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether TensorRT-RTX 1.5.0.114 takes its kernel for one float16 query over many keys, and fails as that has no mask.

    "MyelinCheckException: wrap_attention_op_in_kgen: Expected 3 live inputs, got 4", seen from 1024 keys on and not at 512. The
    same query twice goes to the general kernel; keys and values, which a step's time goes to, are still read once.
    """
    is_one = isinstance(query.shape[2], int) and query.shape[2] == 1
    return is_one and query.dtype == torch.float16 and key.shape[2] > _MOST_KEYS_OF_ONE_QUERY


AttentionInterface.register(TENSORRT_ATTENTION, tensorrt_attention)
register_masks(TENSORRT_ATTENTION)
