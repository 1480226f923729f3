"""The operator `kv_cache_update`, and the layers that update their cache with it in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from ...cache.component import check_count
from ...cache.layers import CacheLayer, ItemsLayer, rounding_storage
from ...cache.layout import PORTABLE, Layout
from ...cache.policies import CircularPolicy, is_one
from ...common.compat.torch import check
from ...errors import UnsupportedModelError
from ...models.cache_factory import ExportableCache
from ..probe_attention import probe_attention
from .attention import is_expressible, sinks_of
from .quantized import check_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.layers import CacheLayer
    from ...cache.layout import WrittenLayer
    from ...cache.policies import SlotPolicy


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


def reference_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Compute `kv_cache_update` row by row, as the oracle of tests."""
    result = cache.clone()
    for row, first in enumerate(start.tolist()):
        result[row, :, first : first + update.shape[2]] = update[row]
    return result


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
        UnsupportedModelError: If the model is an encoder-decoder or keeps images in its cache, if the cache is
            quantized, or if a mixture's layers are.
    """
    check_experts(model)
    if type(cache) is not ExportableCache:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps an encoder's output, which target tensorrt does not support yet; "
            "export for another target"
        )
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
    sinks = layers_with_sinks(model)
    return ExportableCache(
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
