"""Whether a model can be run over rows of different length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.attention.implementation import attention_of
from ..cache.attention.names import ATTENTION
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.codebooks import codebooks_of
from .methods import ProgramMethod
from .program import ResidentModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SLOTS = 8


@torch.no_grad()
def needs_equal_rows(model: PreTrainedModel, cache: ExportableCache) -> bool:
    """Whether the model's own code asks its cache for one length of all rows, so that rows must hold as many tokens.

    Eager steps over rows that differ are refused then. A traced step would take the first row's length for all of them,
    silently. So one token is fed to two rows of different length, over a cache of a few slots.

    Args:
        model: In eval mode.
        cache: Its cache; at one row nothing is asked.
    """
    if cache.batch_size == 1:
        return False
    if any(layer.policy.keeps_prompt for layer in cache.layers):
        # Rows that begin later get their prompts in other pieces, of one token some of them.
        return True
    if isinstance(cache, ExportableEncoderDecoderCache):
        # The relative positions of T5's family, for one.
        return True
    small = ExportableCache.from_model(model, _SLOTS, 2, attn_implementation=None)
    step = ResidentModule(model, small, ProgramMethod("decode", 1, 1))
    codebooks = codebooks_of(model.config)
    shape = (2, 1) if codebooks is None else (2, 1, codebooks.count)
    token = torch.zeros(shape, dtype=torch.int64, device=small.device)
    with attention_of(model, ATTENTION):
        try:
            step(token, torch.tensor([0, 1], device=small.device))
        except Exception:  # `RowsDifferError`, or code of the model's own that cannot tell rows apart
            return True
    return False
