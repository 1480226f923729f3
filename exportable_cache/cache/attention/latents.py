"""Latent attention (MLA) in its absorbed form: queries attend to latents, and no keys and values are made of them.

A module's `kv_b_proj` makes keys and values of every head from a latent. Multiplied by queries and by outputs instead,
it gives the same results, and a step does not expand every slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...common.patch import ORIGINAL


def has_latents(query: torch.Tensor, stored: Sequence[torch.Tensor]) -> bool:
    """Return True if stored tensors are latents and rotated parts, not keys and values: queries are longer."""
    return query.shape[3] != stored[0].shape[3]


def expanded_latents(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand latents to keys and values [batch, heads, length, dim], for a module whose patch passed them through.

    Args:
        module: Attention module.
        kv_nope: Latents [batch, 1, length, kv_lora_rank].
        k_rot: Rotated part of the keys, [batch, 1, length, qk_rope_head_dim].
    """
    return getattr(type(module).expand_kv, ORIGINAL)(module, kv_nope, k_rot)


def latent_queries(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Return queries of latents and rotated parts, [batch, heads, length, kv_lora_rank + qk_rope_head_dim].

    Args:
        module: Attention module.
        query: Its queries [batch, heads, length, qk_nope_head_dim + qk_rope_head_dim].
    """
    size = module.qk_nope_head_dim
    plain, rotated = query.split([size, query.shape[3] - size], dim=-1)
    return torch.cat([_by_head(plain, _expansion(module, query.shape[1])[:, :size]), rotated], dim=-1)


def expanded_output(module: Any, found: torch.Tensor) -> torch.Tensor:
    """Return the output [batch, length, heads, v_head_dim] of attention that found latents.

    Args:
        module: Attention module.
        found: Weighted sums of latents, [batch, length, heads, kv_lora_rank].
    """
    expansion = _expansion(module, found.shape[2])[:, module.qk_nope_head_dim :]
    return _by_head(found.transpose(1, 2), expansion.transpose(1, 2)).transpose(1, 2)


def _expansion(module: Any, heads: int) -> torch.Tensor:
    """Return the weights that expand latents, [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]."""
    weight = module.kv_b_proj.weight
    return weight.view(heads, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])


def _by_head(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply [batch, heads, length, dim] by [heads, dim, other]: [batch, heads, length, other]."""
    batch_size, heads, length, dim = states.shape
    rows = states.transpose(0, 1).reshape(heads, batch_size * length, dim)
    return torch.bmm(rows, weights).reshape(heads, batch_size, length, weights.shape[2]).transpose(0, 1)
