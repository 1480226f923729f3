"""GPT-Neo: its attention assumes that the newest key is in the last slot, and slices its window from a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....common.patch import Patch
from ..conditions import over_our_cache, step_mask

if TYPE_CHECKING:
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention


def _gpt_neo_attention(
    self: GPTNeoSelfAttention,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layer_past: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with windows by position; scores are float32 and not scaled, as upstream."""
    batch_size, length, _ = hidden_states.shape
    query, key, value = (
        projection(hidden_states).view(batch_size, length, self.num_heads, self.head_dim).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    layer = layer_past.layers[self.layer_id] if self.layer_id < len(layer_past.layers) else None
    mask = step_mask(layer, hidden_states, self.config.window_size if self.attention_type == "local" else None)
    key, value = layer_past.update(key, value, self.layer_id)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
    # Both masks, because the model's one covers padding but not windows.
    for addend in (mask, attention_mask):
        scores = scores if addend is None else scores + addend.float().clamp(min=torch.finfo(torch.float32).min / 4)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    output = torch.matmul(weights, value).transpose(1, 2).reshape(batch_size, length, self.embed_dim)
    return self.out_proj(output), weights


PATCHES = {
    "gpt_neo": (
        Patch(
            "gpt_neo.modeling_gpt_neo",
            "GPTNeoSelfAttention.forward",
            over_our_cache(_gpt_neo_attention),
            "it assumes that the newest key is in the last slot",
            digests=("98e5f6e6b3eb7969",),
            source="GPTNeoSelfAttention",
        ),
    )
}
