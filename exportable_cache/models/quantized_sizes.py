"""Bytes of weights as a target stores them once they are quantised, counted on a model that needs no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from .quantization_spec import DEFAULT_GROUP_SIZE, EMBEDDING_SCHEMES, LINEAR_SCHEMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .quantization_spec import Quantization

_FLOAT32, _BFLOAT16 = 4, 2


def quantized_bytes(model: PreTrainedModel, quantization: Quantization) -> int:
    """What `quantize(model, quantization).weights_bytes` would be; only shapes are read.

    Args:
        model: In float32, on any device, the meta device too. Other weights are left as they are.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    group = quantization.group_size or DEFAULT_GROUP_SIZE
    sizes = {id(one): one.numel() * one.element_size() for one in model.parameters()}
    if quantization.linear is not None:
        bits, _ = LINEAR_SCHEMES[quantization.linear]
        # XNNPACK's scales of groups; torchao keeps others in the weights' dtype.
        scale = _BFLOAT16 if bits == 4 and quantization.linear == "8da4w" else _FLOAT32
        for module in model.modules():
            if isinstance(module, nn.Linear) and not (tied and module is head):
                sizes[id(module.weight)] = _integers(module.weight, bits, group, scale)
    if quantization.embeddings is not None:
        bits = EMBEDDING_SCHEMES[quantization.embeddings]
        sizes[id(table.weight)] = _integers(table.weight, bits, group, _FLOAT32)
    return sum(sizes.values())


def _integers(weight: nn.Parameter, bits: int, group: int, scale: int) -> int:
    scales = weight.numel() // group if bits == 4 else weight.shape[0]
    return weight.numel() * bits // 8 + scales * scale
