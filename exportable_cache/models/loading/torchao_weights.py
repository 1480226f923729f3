"""Integers of torchao checkpoints, from the tensors that transformers loads.

Weights of `IntxWeightOnlyConfig`, `Int8DynamicActivationIntxWeightConfig` (8da4w), `Int8WeightOnlyConfig` and
`Int8DynamicActivationInt8WeightConfig` hold integers in int8, also of fewer bits. Others, such as those of
`Int4WeightOnlyConfig`, are packed for GPUs and are dequantised.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .integers import IntegerWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest relative difference of a weight from torchao's, which rounds to the dtype of the checkpoint.
_ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@torch.no_grad()
def kept_tensors(model: PreTrainedModel) -> dict[str, IntegerWeight]:
    """Return the integers of linear layers of a model whose weights are torchao's, by the names of its parameters.

    Activations stay in float: how the checkpoint rounds them is left out.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    kept = {}
    for path, module in model.named_modules():
        is_tied = module is head and head.weight is table.weight
        if isinstance(module, nn.Linear) and not is_tied:
            found = _integers(module.weight)
            if found is not None:
                kept[f"{path}.weight"] = found
    return kept


def _integers(weight: Any) -> IntegerWeight | None:
    """Return the integers of a weight, or None if it has another form."""
    integers, scales, block = (getattr(weight, name, None) for name in ("qdata", "scale", "block_size"))
    if integers is None or scales is None or block is None or getattr(weight, "act_pre_scale", None) is not None:
        return None
    if integers.dtype != torch.int8 or integers.dim() != 2 or integers.shape != weight.shape or len(block) != 2:
        return None
    (outputs, inputs), (rows, size) = integers.shape, block
    if rows not in (1, outputs) or inputs % size or scales.numel() != outputs // rows * (inputs // size):
        return None

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1, inputs // size).expand(outputs, -1).contiguous()

    zeros = getattr(weight, "zero_point", None)
    if zeros is not None and not zeros.any():
        zeros = None
    if zeros is not None:
        zeros = spread(zeros.float() if zeros.is_floating_point() else zeros.to(torch.int8))
    named = re.fullmatch(r"torch\.int([1-8])", str(getattr(weight, "target_dtype", torch.int8)))
    bits = int(named[1]) if named else 8
    # A damaged file may hold others, which would not fit into the stored bits.
    if integers.numel() and not -(2 ** (bits - 1)) <= int(integers.min()) <= int(integers.max()) < 2 ** (bits - 1):
        return None
    found = IntegerWeight(integers, spread(scales), zeros, None, bits, size)
    # By the values, because releases of torchao store other forms by the same names.
    expected = weight.dequantize().float()
    apart = (found.dequantize(torch.float32) - expected).abs().max()
    return found if apart <= _ROUNDING.get(weight.dtype, 0.0) * expected.abs().max() else None
