"""Conversion of a model to another dtype, as `from_pretrained` would have loaded it.

`model.to(dtype)` would round more: the frequencies of RoPE, whose error grows with the position, and tensors that a
model computes with in float32, such as the biases of DeepSeek V3's routers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.transformers import float32_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: End of the names of buffers with frequencies of RoPE, which models compute in float32 and never store.
_FREQUENCIES = "inv_freq"


def keeps_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function from the name of a tensor of a model to True if it stays in float32 in a dtype."""
    names = [name.replace("*", ".*") for name in float32_names(model, dtype)]
    pattern = re.compile("|".join(names)) if names else None
    return lambda name: name.endswith(_FREQUENCIES) or (pattern is not None and pattern.search(name) is not None)


def _floats(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
    """Yield each tensor of floating-point numbers of a model, and the dtype that it gets."""
    keeps, is_loaded = keeps_float32(model, dtype), model.dtype == dtype
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            # A model that was loaded in the dtype has buffers in float32 where its class creates them so, such as the
            # biases of LFM2-MoE's routers, which it does not name.
            is_kept = is_loaded and not isinstance(tensor, torch.nn.Parameter)
            stays = tensor.dtype == torch.float32 and (is_kept or keeps(name))
            yield tensor, torch.float32 if stays else dtype


@torch.no_grad()
def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model to another dtype in place."""
    for tensor, wanted in _floats(model, dtype):
        tensor.data = tensor.data.to(wanted)


@torch.no_grad()
def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model to another dtype without an intermediate copy in the original dtype."""
    memo: dict[int, Any] = {}
    for tensor, wanted in _floats(model, dtype):
        value = tensor.detach().to(wanted, copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    made = copy.deepcopy(model, memo)
    for config in {id(config): config for config in (made.config, made.config.get_text_config(decoder=True))}.values():
        config.dtype = dtype
    return made
