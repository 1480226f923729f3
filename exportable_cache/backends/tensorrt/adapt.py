"""Which form each layer of a model's cache takes in a TensorRT program, or why it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cache.layers import CacheLayer, ItemsLayer, rounding_storage
from ...errors import UnsupportedModelError
from ...models.cache_factory import ExportableCache
from ..probe_attention import probe_attention
from .attention import is_expressible, sinks_of
from .kv_cache import EngineKernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def engine_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """The cache with its layers as TensorRT programs keep them; what they hold is the same.

    Layers of other kinds stay as they are: if their operators convert, their state is copied in every step.

    Raises:
        UnsupportedModelError: If the model is an encoder-decoder, or keeps pictures, or the cache rounds.
    """
    if type(cache) is not ExportableCache:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps an encoder's output beside its tokens, which has no TensorRT form yet; "
            "export for another target"
        )
    if any(isinstance(layer, ItemsLayer) for layer in cache.layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps pictures in layers of cross-attention, which have no TensorRT form yet; "
            "leave out modalities, or export for another target"
        )
    storage = rounding_storage(cache.layers)
    if storage is not None:
        raise UnsupportedModelError(
            f"keys and values kept as {storage.kind} have no TensorRT form: its KVCacheUpdate and attention layers "
            "take float32, float16 and bfloat16; leave kv_dtype (--kv-cache-dtype) out, or export for pt2"
        )
    if not any(_keeps_tokens_alone(layer) for layer in cache.layers):
        return cache
    sinks = layers_with_sinks(model)
    return ExportableCache(
        [
            EngineKernel(null_slots=int(index in sinks)).engine_layer(layer) if _keeps_tokens_alone(layer) else layer
            for index, layer in enumerate(cache.layers)
        ]
    )


def _keeps_tokens_alone(layer: CacheLayer) -> bool:
    return type(layer) is CacheLayer and layer.policy.keeps_keys


def layers_with_sinks(model: PreTrainedModel) -> set[int]:
    """Layers whose keys and values go as they are, each time, to attention with sinks and nothing else of its own.

    Found by running a few tokens through the model.
    """

    def is_sunk(query, key, value, attention_mask, kwargs):
        return sinks_of(query, kwargs) is not None and is_expressible(query, key, value, attention_mask, kwargs)

    calls = probe_attention(model, is_sunk)
    return {index for index, found in calls.items() if all(found)}
