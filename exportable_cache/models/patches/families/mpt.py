"""MPT: it slices its position bias by the sequence length, and does not use the attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ..conditions import only_traced, with_new_names
from ..mechanisms.fused_attention import fusing_attention, with_config

if TYPE_CHECKING:
    from transformers.models.mpt.modeling_mpt import MptAttention


def _mpt_attention(
    self: MptAttention,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch_size, query_length = hidden_states.shape[:2]
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.reshape(batch_size, query_length, self.n_heads, self.head_dim).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = fusing_attention(self)
    if attend is not None:
        assert attention_mask is not None
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(attention_mask, lowest, 0.0)
        bias = position_bias[None, :, :, position_bias.shape[2] - mask.shape[-1] :]
        output, _ = attend(self, query, key, value, mask, scaling=self.softmax_scale, position_bias=bias)
        return self.out_proj(output.reshape(batch_size, query_length, self.hidden_size)), None
    assert self.softmax_scale is not None
    scores = torch.matmul(query, key.transpose(-1, -2)) * self.softmax_scale
    # One bias for all queries, [heads, 1, slots], relative to the last slot, because a constant per row cancels.
    scores = scores + position_bias[:, :, position_bias.shape[2] - key.shape[2] :]
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
    output = torch.matmul(weights, value).transpose(1, 2).reshape(batch_size, query_length, self.hidden_size)
    return self.out_proj(output), weights


def _traced_or_fused(original: Callable) -> Callable:
    traced, fused = only_traced(_mpt_attention)(original), with_new_names(_mpt_attention)

    def method(self: MptAttention, *args: Any, **kwargs: Any) -> Any:
        if fusing_attention(self) is None:
            return traced(self, *args, **kwargs)
        return fused(self, *args, original=original, **kwargs)

    return method


PREPARATIONS = {"mpt": ("", with_config("MptAttention"))}

PATCHES = {
    "mpt": (
        Patch(
            "mpt.modeling_mpt",
            "MptAttention.forward",
            _traced_or_fused,
            "it slices its position bias by the sequence length",
            digests=("2c8c35aac07fbf2b", "da5841a801a90f33"),
            source="MptAttention",
        ),
    )
}
