"""Attention and cache writes for TensorRT: an operator each, and the layers that update their cache in place.

Attention has unexpanded key heads, and becomes TensorRT's attention layer. `kv_cache_update` becomes its cache layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ...cache.attention.functions import EXTRAS, SELECTIONS, matmul_attention
from ...cache.attention.masks import register_masks
from ...cache.component import check_count
from ...cache.layers import CacheLayer, ItemsLayer, rounding_storage
from ...cache.layout import PORTABLE, Layout
from ...cache.policies import CircularPolicy, is_one
from ...common.compat.torch import check
from ...errors import UnsupportedModelError
from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..probe_attention import probe_attention
from .quantized import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.layout import WrittenLayer
    from ...cache.policies import SlotPolicy

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

    Three features are passed through the mask, because the layer has no other input for them:

    - a position bias (T5);
    - sinks: they are the scores of the null slot that the cache layer keeps after the others;
    - if values are shorter than keys (MLA), the scores of the dimensions that only keys have, because the layer
      requires both to have one shape ("Key and Value must have the same shape").

    `matmul_attention` serves soft-capping, values longer than keys, and calls of several queries without a mask: the
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
    if attention_mask is None and is_one(query.shape[2]):
        # Because TensorRT-RTX 1.5 cannot build plain products of one query, of a step's cross-attention over all slots.
        attention_mask = query.new_zeros(1, 1, 1, key.shape[2])
    bias = kwargs.get("position_bias")
    if bias is not None and attention_mask is not None:
        attention_mask = _clamped(attention_mask.to(query.dtype) + bias.to(query.dtype))
        kwargs["position_bias"] = None
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
        mask = _clamped(mask + _scores(query[..., value.shape[-1] :] * scale, key[..., value.shape[-1] :]))
        query, key = query[..., : value.shape[-1]], key[..., : value.shape[-1]]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


def _clamped(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask without -inf: the lowest float16 plus a negative score, from which kernels compute NaN."""
    return mask.clamp(min=torch.finfo(mask.dtype).min)


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


@torch.library.custom_op("exportable_cache::kv_cache_update", mutates_args=())
def kv_cache_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the cache with `update` at positions `start[b]` to `start[b] + Q - 1` of each row.

    The caller ensures `start[b] + Q <= S`, because no lowering can check it.

    Args:
        cache: [B, H, S, D].
        update: [B, H, Q, D], of the cache's dtype.
        start: int64 [B].

    Returns:
        [B, H, S, D], a new tensor.
    """
    return scatter_update(cache, update, start)


@kv_cache_update.register_fake
def _(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    # Static facts only: lengths may be symbolic.
    check(
        update.dtype == cache.dtype, lambda: f"update must be {cache.dtype} like the cache, got {update.dtype}; cast it"
    )
    check(start.dtype == torch.int64, lambda: f"start must be int64, got {start.dtype}")
    check(start.dim() == 1, lambda: f"start must be [batch], got {start.dim()} dimensions")
    return torch.empty_like(cache)


def scatter_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Compute `kv_cache_update` with plain operators, for runtimes that cannot alias; it copies the cache."""
    batch, heads, length, dim = update.shape
    slots = start[:, None] + torch.arange(length, device=cache.device)
    return cache.scatter(2, slots[:, None, :, None].expand(batch, heads, length, dim), update)


@dataclass(frozen=True)
class EngineLayout(Layout, kind="tensorrt"):
    """Layout that writes float keys and values through `kv_cache_update`, and may keep a null slot.

    TensorRT's attention layer has no sinks. But a key of zeros has the score that the mask gives it, and a value of
    zeros adds nothing. So a slot that is never written, with each head's sink logit in the mask, turns its softmax into
    one with a sink. The slot is the last of the tensors and of what `update` returns. Only attention sees it; the
    policy's capacity, positions, masks and bounds do not count it.

    A ring writes a single token in place, at the policy's next slot. A prompt gathers the newest tokens from the cache
    and the new tokens, which no TensorRT layer does in place.

    Attributes:
        null_slots: 1 if the layer's attention has sinks, else 0.

    Raises:
        InputError: If `null_slots` is not an int of at least 0.
    """

    null_slots: int = 0

    def __post_init__(self) -> None:
        check_count(self.null_slots, "null_slots of a TensorRT layout", 0)

    def sizes(self, policy: SlotPolicy) -> Mapping[str, int]:
        """Return the number of slots, the null slot included."""
        capacity = policy.capacity
        assert capacity is not None
        return {"capacity": capacity + self.null_slots}

    def engine_layer(self, layer: CacheLayer) -> CacheLayer:
        """Return the layer with this layout and the same contents."""
        tensors = dict(layer.named_state())
        assert layer.storage is not None
        for name in layer.storage.parts:
            tensors[name] = F.pad(tensors[name], (0, 0, 0, self.null_slots))
        return layer.with_layout(self, tensors)

    def update(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Layout.update`; the tensors are rebound, not mutated."""
        policy = layer.policy
        if isinstance(policy, CircularPolicy) and not is_one(key_states.shape[2]):
            return self._gather(layer, key_states, value_states)
        start = policy.next_slot(layer.cumulative_length)
        layer.keys = kv_cache_update(layer.keys, key_states, start)
        layer.values = kv_cache_update(layer.values, value_states, start)
        layer.advance(key_states.shape[2])
        return layer.keys, layer.values

    def _gather(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.null_slots:
            return PORTABLE.update(layer, key_states, value_states)
        capacity = layer.capacity
        assert layer.keys is not None
        assert layer.values is not None
        null_keys, null_values = layer.keys[:, :, capacity:], layer.values[:, :, capacity:]
        layer.keys, layer.values = layer.keys[:, :, :capacity], layer.values[:, :, :capacity]
        keys, values = PORTABLE.update(layer, key_states, value_states)
        layer.keys, layer.values = (
            torch.cat([layer.keys, null_keys], dim=2),
            torch.cat([layer.values, null_values], dim=2),
        )
        return torch.cat([keys, null_keys], dim=2), torch.cat([values, null_values], dim=2)


def engine_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """Return the cache with its layers as TensorRT programs keep them, and the same contents.

    Layers of other kinds are unchanged: if their operators convert, their state is copied in every step.

    Raises:
        UnsupportedModelError: If the model keeps images in its cache, if the cache is quantized, or for weights, see
            `check_weights`.
    """
    check_weights(model)
    if any(isinstance(layer, ItemsLayer) for layer in cache.layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps images in cross-attention layers, which target tensorrt does not support; "
            "omit modalities, or export for another target"
        )
    storage = rounding_storage(cache.layers)
    if storage is not None:
        raise UnsupportedModelError(
            f"kv_dtype must be float32, float16 or bfloat16 for target tensorrt, got {storage.kind}, because its "
            "KVCacheUpdate and attention layers take no others; omit kv_dtype (--kv-dtype), or export for pt2"
        )
    if not any(keeps_tokens_alone(layer) for layer in cache.layers):
        return cache
    # The probe feeds a text decoder, and encoder-decoders have no sinks.
    sinks = set[int]() if isinstance(cache, ExportableEncoderDecoderCache) else layers_with_sinks(model)
    return cache.with_layers(
        [
            EngineLayout(null_slots=int(index in sinks)).engine_layer(layer) if keeps_tokens_alone(layer) else layer
            for index, layer in enumerate(cache.layers)
        ]
    )


def keeps_tokens_alone(layer: CacheLayer) -> bool:
    """Return True if a layer keeps keys and values, and no other state."""
    return type(layer) is CacheLayer and layer.policy.keeps_keys


def layers_with_sinks(model: PreTrainedModel) -> set[int]:
    """Return the indices of layers whose attention has sinks that TensorRT's layer can express.

    It runs a few tokens through the model. The keys and values of such a layer are passed to attention unchanged.
    """

    def is_sunk(query, key, value, attention_mask, kwargs):
        return sinks_of(query, kwargs) is not None and is_expressible(query, key, value, attention_mask, kwargs)

    calls = probe_attention(model, is_sunk)
    return {index for index, found in calls.items() if all(found)}
