"""MPT: it slices its position bias by the tokens seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from .conditions import only_traced
from .patch import Patch

if TYPE_CHECKING:
    from torch import nn


def _mpt_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, query_length = hidden_states.shape[:2]
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.reshape(batch_size, query_length, self.n_heads, self.head_dim).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    scores = torch.matmul(query, key.transpose(-1, -2)) * self.softmax_scale
    # One bias for every query, [heads, 1, slots]: relative to the last slot, which shifts a row of scores as a whole.
    scores = scores + position_bias[:, :, position_bias.shape[2] - key.shape[2] :]
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
    output = torch.matmul(weights, value).transpose(1, 2).reshape(batch_size, query_length, self.hidden_size)
    return self.out_proj(output), weights


PATCHES = {
    "mpt": (
        Patch(
            "mpt.modeling_mpt",
            "MptAttention.forward",
            only_traced(_mpt_attention),
            "it slices its position bias by the tokens seen",
            digests=("2c8c35aac07fbf2b",),
            source="MptAttention",
        ),
    )
}
