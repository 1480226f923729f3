"""The dtype of a model's weights, and a model in another one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..cache.spec import CacheSpec


def stored_dtype(model_or_config: PreTrainedModel | PreTrainedConfig) -> torch.dtype | None:
    """The dtype of a model's weights, or the one that a config says they are stored in; None where it does not."""
    if isinstance(model_or_config, PreTrainedModel):
        return model_or_config.dtype
    for config in (model_or_config, model_or_config.get_text_config(decoder=True)):
        named = getattr(config, "dtype", None)
        named = getattr(torch, named.removeprefix("torch."), None) if isinstance(named, str) else named
        if isinstance(named, torch.dtype):
            return named
    return None


def asked_dtype(spec: CacheSpec) -> torch.dtype | None:
    """Return the dtype that a spec asks for, after `CacheSpec` has replaced names; None where it asks for none."""
    assert not isinstance(spec.dtype, str)
    return spec.dtype


@torch.no_grad()
def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model in another dtype; the original is left alone, and no second copy in its own dtype is made on
    the way.

    Every floating parameter and buffer is converted, as `model.to(dtype)` does.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            value = tensor.detach().to(dtype, copy=True)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    made = copy.deepcopy(model, memo)
    for config in {id(config): config for config in (made.config, made.config.get_text_config(decoder=True))}.values():
        config.dtype = dtype
    return made
