"""Zaya: its delayed values drop the last token of a step, so tracers specialise on steps of two tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ..conditions import only_traced


def _convolved(
    self: Any,
    hidden_states: torch.Tensor,
    cache: Any,
    conv_mask: torch.Tensor | None = None,
    *,
    original: Callable,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [batch, length, heads, dim]; half of a value is from the previous token."""
    # Caches of transformers 5.20 do not have this method.
    if not hasattr(cache, "get_recurrent_state") or cache.get_recurrent_state(self.layer_idx) is None:
        return original(self, hidden_states, cache, conv_mask)
    if conv_mask is not None:
        hidden_states = hidden_states * conv_mask[:, :, None].to(hidden_states.dtype)
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    groups, length = self.num_key_value_groups, hidden_states.shape[1]
    query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
    mixed = torch.cat([query, key], dim=-1).transpose(1, 2)
    residual = (query.reshape(shape) + key.reshape(shape).repeat_interleave(groups, dim=2)) * 0.5
    of_keys = residual.reshape(*hidden_states.shape[:2], -1, groups, self.head_dim).mean(dim=-2)
    before = cache.get_conv_state(self.layer_idx)
    mixed = torch.cat([before, mixed], dim=-1)
    cache.update_conv_state(mixed.narrow(-1, length, self.conv_kernel_size), self.layer_idx)
    mixed = self.conv_qk_grouped(self.conv_qk_depthwise(mixed)).transpose(1, 2)
    sizes = [query.shape[-1], key.shape[-1]]
    query, key = (
        one.reshape(shape) + rest for one, rest in zip(mixed.split(sizes, dim=-1), (residual, of_keys), strict=True)
    )
    delayed = self.v_proj_delayed(hidden_states)
    previous = cache.get_recurrent_state(self.layer_idx)[:, None]
    value = torch.cat([self.v_proj_current(hidden_states), torch.cat([previous, delayed], 1).narrow(1, 0, length)], -1)
    cache.update_recurrent_state(delayed[:, -1], self.layer_idx)
    return query, key, value.reshape(shape)


PATCHES = {
    "zaya": (
        Patch(
            "zaya.modeling_zaya",
            "ZayaCCAProjection.forward",
            only_traced(_convolved),
            "it drops the last token of a step, so tracers specialise on steps of two tokens",
            digests=("73444030a0d7a64a", "0cb200d20a90c6fe", "cde0891bce7411dc"),
            source="ZayaCCAProjection",
            needed=False,
        ),
    )
}
