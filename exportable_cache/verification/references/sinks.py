"""The reference for attention sinks: transformers' own cache and eager attention, with the tokens in between really
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...cache.spec import Sinks


class EvictingLayer(DynamicLayer):
    """A `DynamicLayer` fed one token at a time that gives out the first `sinks.tokens` and the newest `sinks.window`
    only.

    What is given out needs no mask, so this shares nothing with what it is a reference for. Positions stay absolute.
    """

    def __init__(self, sinks: Sinks) -> None:
        super().__init__()
        self.sinks = sinks
        self.seen = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Append one token, [batch, heads, 1, dim] each, drop the one that left the window, and return the rest."""
        assert key_states.shape[-2] == 1
        keys, values = super().update(key_states, value_states)
        self.seen += 1
        if keys.shape[-2] > self.sinks.tokens + self.sinks.window:
            first, last = self.sinks.tokens, self.sinks.tokens + 1
            self.keys = torch.cat([keys[:, :, :first], keys[:, :, last:]], dim=-2)
            self.values = torch.cat([values[:, :, :first], values[:, :, last:]], dim=-2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = min(self.seen + query_length, self.sinks.tokens + self.sinks.window)
        # Positions that end at the query: none of the keys is hidden.
        return kept, self.seen + query_length - kept


def evicting_cache(
    config: PreTrainedConfig, sinks: Sinks, plain: Callable[..., DynamicCache] = DynamicCache
) -> DynamicCache:
    """A cache that `plain` makes for a model whose full-attention layers keep sinks and a window; feed it token by
    token.
    """
    cache = plain(config=config)
    cache.layers = [EvictingLayer(sinks) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
