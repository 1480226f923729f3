"""Bytes of weights as a target stores them that keeps each in the type that has its numbers without loss."""

from __future__ import annotations

import torch
from torch import nn

from ..common.dtypes import exact_dtype


def exact_bytes(model: nn.Module, stored: torch.dtype | None = None) -> int:
    """Of all parameters, tied ones once: linear layers' and tables' weights in that type, others as they are.

    Args:
        stored: The type, where the model has shapes alone.
    """
    sizes = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.dtype == torch.float32:
            dtype = exact_dtype(module.weight) if stored is None else stored
            sizes[id(module.weight)] = module.weight.numel() * dtype.itemsize
    return sum(sizes.values())
