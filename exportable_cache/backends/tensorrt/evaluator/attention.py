"""ATTENTION_INPUT and ATTENTION_OUTPUT: the two ends of one IAttention, which sees all of it at its input.

Semantics from the Attention page of the operator reference: softmax(query @ key.T + mask) @ value without any scale of
its own; query heads share key and value heads in consecutive groups; a bool mask is True where attention is allowed.
"""

from __future__ import annotations

import math
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
    if layer.has_input(3) and layer.inputs[3].dtype not in (torch.bool, layer.inputs[0].dtype):
        raise layer.wrong(f"has a mask of {layer.inputs[3].dtype} for queries of {layer.inputs[0].dtype}")

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
