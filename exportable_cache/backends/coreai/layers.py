"""The layout of keys and values in Core AI programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...cache.layers import CacheLayer
from ...cache.layout import PORTABLE, PortableLayout
from ...cache.policies import is_one
from ...cache.slots import read_slots
from ...errors import UnsupportedModelError
from ...models.cache_factory import ExportableCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.layout import WrittenLayer


@dataclass(frozen=True)
class GatheredLayout(PortableLayout, kind="gathered"):
    """Layout that writes several tokens by one gather over the old slots and the new tokens.

    Core AI's converter takes `index_put` of a fixed number of tokens only. A gather reads and writes all slots of a
    layer, which costs a prompt little. Single tokens are written in place, as in the portable layout.
    """

    def _write(
        self, layer: WrittenLayer, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> list[torch.Tensor]:
        """See `PortableLayout._write`; the slots of a row follow each other."""
        query_length, storage = key_states.shape[2], layer.storage
        if is_one(query_length):
            return super()._write(layer, slots, key_states, value_states)
        assert storage is not None
        slot = torch.arange(layer.policy.slot_count, device=layer.device)
        offset = slot - slots[:, :1]
        is_new = (offset >= 0) & (offset < query_length)
        source = torch.where(is_new, layer.policy.slot_count + offset, slot)
        written = []
        for name, rows in zip(storage.parts, storage.encode(key_states, value_states), strict=True):
            written.append(read_slots(torch.cat([getattr(layer, name), rows], dim=2), source))
            layer.replace(name, written[-1])
        return written


def gathered_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """Return the cache with layers as Core AI programs keep them, and the same contents.

    Raises:
        UnsupportedModelError: If the model is an encoder-decoder.
    """
    if type(cache) is not ExportableCache:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps an encoder's output, which target coreai does not support yet; export for "
            "another target"
        )
    return ExportableCache([_gathered(layer) for layer in cache.layers])


def _gathered(layer: CacheLayer) -> CacheLayer:
    if layer.storage is None or layer.layout != PORTABLE:
        return layer
    return layer.with_layout(GatheredLayout(), dict(layer.named_state()))
