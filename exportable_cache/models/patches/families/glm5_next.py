"""GLM 5 Next: the number of its indexer's pools of keys depends on data, because it keeps complete ones only.

It also counts selected tokens with 32-bit indices, which ExecuTorch does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ..conditions import only_traced


def _all_pools(
    self: Any, packed_states: torch.Tensor, *, original: Callable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pools of all slots with a mask of the complete ones, which are the only ones that callers use.

    Returns:
        Keys [batch, pools, dim]; the slots of each pool, int64 [batch, pools, index_kpool], -1 for empty; and True for
        complete pools, bool [batch, pools].
    """
    keys, gates, real = packed_states.split([self.head_dim, self.head_dim, 1], dim=-1)
    is_real = real[..., 0] != 0
    slots = keys.shape[1]
    pools = (slots + self.index_kpool - 1) // self.index_kpool
    first = torch.where(is_real.any(-1), is_real.to(torch.int64).argmax(-1), slots)
    offsets = torch.arange(pools * self.index_kpool, device=keys.device).reshape(1, pools, self.index_kpool)
    indices = first[:, None, None] + offsets
    row = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
    found = indices.clamp(0, slots - 1)
    is_there = is_real[row, found] & (indices < slots)
    logits = gates[row, found].float() + self.index_kpool_compress_ape.float()
    # Finite, so that an empty pool does not give NaN.
    logits = torch.where(is_there[..., None], logits, torch.finfo(torch.float32).min)
    pooled = (torch.softmax(logits, dim=2).to(keys.dtype) * keys[row, found]).sum(dim=2)
    return pooled, torch.where(is_there, indices, -1), is_there.all(-1)


def _counted_by_long_indices(
    self: Any, topk_indices: torch.Tensor, *args: Any, original: Callable, **kwargs: Any
) -> Any:
    return original(self, topk_indices.to(torch.int64), *args, **kwargs)


_PATCHES = (
    Patch(
        "glm5_next.modeling_glm5_next",
        "Glm5NextTextIndexer.get_pooled_states",
        only_traced(_all_pools),
        "the number of its indexer's pools depends on data",
        digests=("4edb0be4b131b67a", "4635523aa501e70f"),
        source="Glm5NextTextIndexer",
    ),
    Patch(
        "glm5_next.modeling_glm5_next",
        "Glm5NextTextAttention.build_attention_mask_from_topk",
        only_traced(_counted_by_long_indices),
        "it counts selected tokens with 32-bit indices",
        digests=("c30cbbdbb1c4d8a4",),
        needed=False,
    ),
)
PATCHES = {"glm5_next": _PATCHES, "glm5_next_text": _PATCHES}
