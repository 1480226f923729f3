"""The reference for rounded caches: transformers' own cache, fed keys and values that were rounded and brought back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

if TYPE_CHECKING:
    import torch

    from ...cache.storage import Storage


class RoundingCache(DynamicCache):
    """A `DynamicCache` of what a storage would give out: what a cache of that storage holds, whatever its policy.

    Args:
        storage: What rounds.
        **options: Of `DynamicCache`.
    """

    def __init__(self, storage: Storage, **options: Any) -> None:
        super().__init__(**options)
        self.storage = storage

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(*rounded(self.storage, key_states, value_states), *args, **kwargs)


def rounded(storage: Storage, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., head_dim] and values [..., value_head_dim] as a layer of this storage gives them out."""
    return storage.decode(storage.encode(keys, values))
