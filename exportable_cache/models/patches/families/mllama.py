"""Llama 3.2 Vision: masks of the images that each token sees, over their slots in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch


def _over_slots(original: Callable) -> Callable:
    def masks(
        cross_attention_mask: torch.Tensor, num_vision_tokens: int, dtype: torch.dtype, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return masks for int64 [batch, length, tiles]: 1 if a token sees a tile, -1 if only its attention does.

        Upstream, a token without images attends to all of its prompt's, and skips the layer's MLP. Over slots there are
        two such tokens: one before the images of its prompt, -1; and one of plain text, 0, which attends only to the
        slot of zeros after the images, so that the layer does not change it.
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
            "it has no mask for tokens that see none of the images in the cache",
            digests=("3f1cd28e8a617bda", "cd181603d1aa4325"),
            source="_prepare_cross_attention_mask _has_cached_cross_attention_states",
        ),
    )
}
