"""Which layers of a model this package's operators compute exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....cache.policies import FullPolicy, RingPolicy, SinkPolicy
from ....cache.storage import FloatStorage, HalfStorage, Int4Storage, Int8Storage
from ....models.layers.layout import layer_types_and_windows
from ....models.quantized_rows import has_quantized_weights
from ...probe_attention import is_causal, probe_attention
from .native_kernel import NativeKernel, NativeLatentKernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ....cache.layers import CacheLayer
    from ....models.cache_factory import ExportableCache

_POLICIES = (FullPolicy, RingPolicy, SinkPolicy)
_STORAGES = (FloatStorage, HalfStorage, Int8Storage, Int4Storage)


def native_kernels(model: PreTrainedModel, cache: ExportableCache) -> list[NativeKernel | None]:
    """The kernel of each layer that the operators compute exactly, found by running a short prompt through the model;
    None for the others.

    Such a layer keeps keys and values in float32 or fewer bits, and its attention goes through the attention interface
    with the very tensors that the cache returned. A mask that is not causal, and what is added to the scores by the
    key's position, need a layer that keeps every token.
    """

    def needs(query, key, value, attention_mask, kwargs):
        if attention_mask is None:
            return None
        masked = not is_causal(attention_mask) or kwargs.get("indices") is not None
        return _Needs(masked, masked or kwargs.get("position_bias") is not None, hasattr(kwargs["module"], "expand_kv"))

    calls = probe_attention(model, needs, latents=not has_quantized_weights(model))
    types = [layer_type for layer_type, _ in layer_types_and_windows(model.config)]
    return [_kernel_for(layer, types[index], calls.get(index, [])) for index, layer in enumerate(cache.layers)]


@dataclass(frozen=True)
class _Needs:
    """Of one call of attention: whether its mask is looked at, whether something is added to the scores, and whether
    its keys are latents.
    """

    masked: bool
    biased: bool
    of_latents: bool


def _kernel_for(layer: CacheLayer, layer_type: str, calls: list[Any]) -> NativeKernel | None:
    if not isinstance(layer.policy, _POLICIES) or not isinstance(layer.storage, _STORAGES):
        return None
    if not calls or not all(calls) or layer.storage.rows_dtype != torch.float32:
        return None
    if dict(layer.named_state())["values"].shape[-1] == 0:
        return None
    is_full = isinstance(layer.policy, FullPolicy)
    if not is_full and any(call.biased for call in calls):
        return None
    chunked = layer_type == "chunked_attention" and not is_full
    form = (chunked, any(call.masked for call in calls), len(calls))
    if any(call.of_latents for call in calls):
        # Whole numbers of keys and of values have scales of their own, which their sum in one product has no place for.
        return NativeLatentKernel(*form) if isinstance(layer.storage, (FloatStorage, HalfStorage)) else None
    return NativeKernel(*form)
