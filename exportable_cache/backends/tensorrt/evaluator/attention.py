"""Evaluate ATTENTION_INPUT, ATTENTION_OUTPUT and KV_CACHE_UPDATE."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .layer import attribute_names, check_attributes, layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


# `decomposable` decides which kernels run, not what they compute.
_HONOURED = (
    "mask",
    "norm_op",
    "causal",
    "causal_kind",
    "decomposable",
    "metadata",
    "name",
    "num_inputs",
    "num_outputs",
)
_EXPECTED = {
    "query_form": "PADDED_BHND",
    "key_value_form": "PADDED_BHND",
    "query_lengths": None,
    "key_value_lengths": None,
    "normalization_quantize_scale": None,
    "num_ranks": 1,
}
# Reading it raises an error in the log unless a scale is set, which is refused.
_UNREADABLE = ("normalization_quantize_to_type",)


@layer_kind("ATTENTION_INPUT", "IAttentionInputLayer", honours=("attention",), inputs=(3, 8), same_dtype=(0, 1, 2))
def attention_input(layer: NetworkLayer) -> Compute:
    """The whole attention over query [batch, heads, q, dim], key and value [batch, kv_heads, kv, dim] and mask.

    In float32, rounded once: fused kernels keep scores and weights there, others may round them in between.
    """
    settings = _settings(layer, layer["attention"])
    causal = settings.get("causal_kind", "UPPER_LEFT" if settings["causal"] else "NONE")
    normalise = {"SOFTMAX": True, "NONE": False}.get(settings["norm_op"])
    if normalise is None or causal not in ("NONE", "UPPER_LEFT", "LOWER_RIGHT"):
        raise layer.unsupported(f"has norm_op {settings['norm_op']} and causal_kind {causal}")
    if (settings["mask"] is not None) != layer.has_input(3):
        raise layer.wrong(f"has {len(layer.inputs)} inputs and {'a' if settings['mask'] is not None else 'no'} mask")
    if any(layer.has_input(index) for index in range(4, len(layer.inputs))):
        raise layer.unsupported(f"has {len(layer.inputs)} inputs")
    if settings["mask"] is not None and causal != "NONE":
        raise layer.wrong("is causal and has a mask, of which TensorRT keeps one only")
    if layer.has_input(3) and layer.required(3).dtype not in (torch.bool, layer.required(0).dtype):
        raise layer.wrong(f"has a mask of {layer.required(3).dtype} for queries of {layer.required(0).dtype}")

    def compute(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *absent: None
    ) -> torch.Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads:
            raise layer.wrong(f"has {heads} query heads for {kv_heads} key heads")
        groups = heads // kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query.float() @ key.float().mT
        if mask is not None:
            if mask.shape[2:] != scores.shape[2:]:
                raise layer.wrong(f"has a mask of {list(mask.shape)} for scores of {list(scores.shape)}")
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
        elif causal != "NONE":
            q, kv = scores.shape[2:]
            offset = kv - q if causal == "LOWER_RIGHT" else 0
            later = torch.arange(kv) > torch.arange(q)[:, None] + offset
            scores = scores.masked_fill(later, -math.inf)
        weights = scores.softmax(-1) if normalise else scores
        return (weights @ value.float()).to(query.dtype)

    return compute


def _settings(layer: NetworkLayer, attention: Any) -> dict[str, Any]:
    """Attributes of the IAttention, after a look at each."""
    names = attribute_names(type(attention), _UNREADABLE)
    settings = {name: getattr(attention, name) for name in names}
    settings = {name: value.name if hasattr(type(value), "__members__") else value for name, value in settings.items()}
    check_attributes(layer, settings, _HONOURED, _EXPECTED)
    return settings


@layer_kind("ATTENTION_OUTPUT", "IAttentionOutputLayer", honours=("attention",))
def attention_output(layer: NetworkLayer) -> Compute:
    return lambda x: x


@layer_kind(
    "KV_CACHE_UPDATE",
    "IKVCacheUpdateLayer",
    expects={"cache_mode": "LINEAR", "update_form": "PADDED_BHND", "update_lengths": None},
    inputs=(3, 3),
    same_dtype=(0, 1),
)
def kv_cache_update(layer: NetworkLayer) -> Compute:
    """`cache[i, :, start[i] + s] = update[i, :, s]`: cache [batch, heads, capacity, dim], update [batch, heads, q,
    dim], start [batch]. TensorRT checks no bound at run time; here a write past the end is an error.
    """

    def compute(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        length, capacity = update.shape[2], cache.shape[2]
        if start.shape != (len(cache),) or update.shape[:2] != cache.shape[:2] or update.shape[3:] != cache.shape[3:]:
            raise layer.wrong(f"writes {list(update.shape)} at {list(start.shape)} into {list(cache.shape)}")
        result = cache.clone()
        for row, first in enumerate(start.tolist()):
            if not 0 <= first <= capacity - length:
                raise layer.wrong(f"writes {length} tokens at {first} into a cache of {capacity} slots")
            result[row, :, first : first + length] = update[row]
        return result

    return compute


def check_aliases(layers: Sequence[NetworkLayer], inputs: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """Output name -> input name of every cache that is updated in place.

    Raises:
        VerificationError: If a cache is no network input, its update no network output, or anything else reads the
            cache: it shares its memory with the update, and which of the two states a reader would see is undefined.
    """
    aliases: dict[str, str] = {}
    for layer in layers:
        if layer.kind != "KV_CACHE_UPDATE":
            continue
        cache, updated = layer.required(0).name, layer.outputs[0].name
        if cache not in inputs or updated not in outputs:
            raise layer.wrong("updates a cache that is not a network input, or whose update is not a network output")
        readers = [(other, index) for other in layers for index, t in enumerate(other.inputs) if t and t.name == cache]
        if len(readers) > 1:
            other = next((other for other, index in readers if other is not layer), layer)
            raise layer.wrong(f"updates {cache!r} in place while {other} reads it")
        aliases[updated] = cache
    return aliases
