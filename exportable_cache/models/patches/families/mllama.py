"""Llama 3.2 Vision: what a step says of the pictures that each token sees, as a mask over the slots kept of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch


def _over_slots(original: Callable) -> Callable:
    def masks(
        cross_attention_mask: torch.Tensor, num_vision_tokens: int, dtype: torch.dtype, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a step of ours, int64 [batch, length, tiles]: 1 where a token sees a tile, -1 where its attention alone
        does.

        Upstream a token without pictures attends to all of its prompt, and the layer's MLP leaves it out. Over slots
        there are two such tokens: one in whose prompt pictures follow, -1; and one of text, which the layer must not
        change, and which attends to the slot of zeros behind the pictures'.
        """
        if cross_attention_mask.dim() != 3:
            return original(cross_attention_mask, num_vision_tokens, dtype=dtype, **kwargs)
        attends = cross_attention_mask != 0
        slots = attends[..., None].expand(*attends.shape, num_vision_tokens).flatten(2)
        seen = torch.cat([slots, ~attends.any(dim=-1, keepdim=True)], dim=-1)[:, None]
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return mask, (cross_attention_mask > 0).any(dim=-1)[:, None, :, None].to(dtype)

    return masks


PATCHES = {
    "mllama": (
        Patch(
            "mllama.modeling_mllama",
            "_prepare_cross_attention_mask",
            _over_slots,
            "it has no mask of a token that sees none of the pictures kept",
            digests=("3f1cd28e8a617bda",),
            source="_prepare_cross_attention_mask _has_cached_cross_attention_states",
        ),
    )
}
