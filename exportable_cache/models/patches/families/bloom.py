"""Bloom: its position bias has the size of the padding mask, but a static cache has more slots."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....cache.checks import check_covers
from ....common.patch import Patch
from ..conditions import CACHE, over_our_cache

if TYPE_CHECKING:
    from torch import nn


def _bloom_model(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    new = input_ids if inputs_embeds is None else inputs_embeds
    if attention_mask is not None and attention_mask.dim() == 2 and cache is not None and new is not None:
        length = new.shape[1]
        check_covers(attention_mask, cache.get_query_offset(0), length)
        slots, _ = cache.get_mask_sizes(length, 0)
        # Slot s holds position s, and slots after the mask are empty.
        attention_mask = F.pad(attention_mask, (0, max(0, slots - attention_mask.shape[1])))
    elif attention_mask is None and cache is not None and new is not None and not _counts_slots(self):
        attention_mask = new.new_ones(new.shape[0], cache.get_mask_sizes(new.shape[1], 0)[0], dtype=torch.int64)
    return original(
        self,
        input_ids,
        *args,
        attention_mask=attention_mask,
        **{CACHE: cache},
        inputs_embeds=inputs_embeds,
        **kwargs,
    )


def _counts_slots(model: nn.Module) -> bool:
    """True if the bias without a mask has the size of the slots, as since transformers 5.23.

    Transformers 5.20 creates a mask as long as the sequence.
    """
    return hasattr(sys.modules[type(model).__module__], "_get_alibi_slopes")


PATCHES = {
    "bloom": (
        Patch(
            "bloom.modeling_bloom",
            "BloomModel.forward",
            over_our_cache(_bloom_model),
            "its position bias has the size of the padding mask, not of the slots",
            digests=("f424283fd809e33d", "b02943aa0253d5b5", "b2b4c798ab3c90b9"),
        ),
    )
}
