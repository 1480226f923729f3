"""MiniMax: it accepts only a `MiniMaxCache`, and its linear attention loops over the tokens of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....common.patch import Patch
from ...scans import state_space_scan
from ..conditions import over_our_cache

if TYPE_CHECKING:
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention, MiniMaxModel


def _without_cache_check(self: MiniMaxModel, *args: Any, original: Callable, **kwargs: Any) -> Any:
    """Disable `use_cache`, because the model checks the class of its cache only with it."""
    return original(self, *args, **{**kwargs, "use_cache": False})


def _lightning_attention(
    self: MiniMaxLightningAttention,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `h[t] = exp(-slope) h[t-1] + k[t] v[t]`, `y[t] = q[t] h[t]` (arXiv:2501.08313, section 2.2)."""
    batch_size, length, _ = hidden_states.shape
    mixed = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = mixed * attention_mask[:, :, None].to(mixed.dtype)
    query, key, value = mixed.reshape(batch_size, length, self.num_attention_heads, 3 * self.head_dim).chunk(3, dim=-1)
    state = cache.get_recurrent_state(self.layer_idx)
    if state is None:
        state = value.new_zeros(batch_size, self.num_attention_heads, self.head_dim, self.head_dim)
    steps = torch.ones(batch_size, length, self.num_attention_heads, dtype=torch.float32, device=value.device)
    output, state = state_space_scan(value, steps, -self.slope_rate.flatten().float(), key, query, state.float())
    cache.update_recurrent_state(state.to(value.dtype), self.layer_idx)
    output = self.norm(output.to(value.dtype).reshape(batch_size, length, self.num_attention_heads * self.head_dim))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), state


PATCHES = {
    "minimax": (
        Patch(
            "minimax.modeling_minimax",
            "MiniMaxModel.forward",
            over_our_cache(_without_cache_check),
            "it accepts only a MiniMaxCache",
            digests=("5d15e07c1aa62c73", "917fbe0f4e8b6cce", "80ce253c73965179"),
        ),
        Patch(
            "minimax.modeling_minimax",
            "MiniMaxLightningAttention.forward",
            over_our_cache(_lightning_attention),
            "it keeps its state in a MiniMaxCache, and loops over the tokens of a step",
            digests=("5ad232eb952984af", "2ed76bbeb2c45e0a"),
            source="MiniMaxLightningAttention",
        ),
    )
}
