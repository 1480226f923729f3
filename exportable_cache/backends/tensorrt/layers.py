"""Cache layers whose writes stay one node, `kv_cache_update`, for TensorRT to do in place. They exist in traced programs only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ...cache.layers import FullLayer, KeyValueLayer, RingLayer, SinkLayer
from ...cache.layers.circular import is_one
from .kv_cache_update import kv_cache_update


class EngineKeyValueLayer(KeyValueLayer):
    """Writes through `kv_cache_update`, and may keep a null slot.

    TensorRT's attention layer knows no sinks, but a key of zeros has the score that the mask gives it, and a value of zeros adds
    nothing: one slot that is never written, under a mask that holds each head's sink logit there, makes its softmax one with a
    sink. The slot is the last of the tensors and of what `update` returns, no part of `capacity`, and seen by attention alone:
    positions, masks and bounds do not count it.

    Attributes:
        null_slots: 1 where the layer's attention has sinks, 0 elsewhere.
    """

    config_names = (*KeyValueLayer.config_names, "null_slots")

    null_slots: int

    @classmethod
    def like(cls, layer: KeyValueLayer, null_slots: int) -> EngineKeyValueLayer:
        """The layer in this form, with the same contents."""
        tensors = dict(layer.named_state())
        for name in ("keys", "values"):
            tensors[name] = F.pad(tensors[name], (0, 0, 0, null_slots))
        return cls.from_state({**layer.config(), "null_slots": null_slots}, tensors)

    def _update_from(
        self, start: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens at slots `start` [batch_size] and on; the tensors are rebound, not mutated."""
        self.keys = kv_cache_update(self.keys, key_states, start)
        self.values = kv_cache_update(self.values, value_states, start)
        self.advance(key_states.shape[2])
        return self.keys, self.values


class EngineFullLayer(EngineKeyValueLayer, FullLayer):
    """A `FullLayer` that writes through `kv_cache_update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FullLayer.update`."""
        return self._update_from(self.cumulative_length, key_states, value_states)


class _EngineTurningLayer(EngineKeyValueLayer):
    """What overwrites its oldest tokens: one token is written through `kv_cache_update`, at the layer's next slot.

    A prompt's write gathers the newest tokens: it reads the cache and the new tokens together, which no layer of TensorRT does
    in place.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the layer that this is a form of."""
        if is_one(key_states.shape[2]):
            return self._update_from(self._next_slot, key_states, value_states)
        if not self.null_slots:
            return super().update(key_states, value_states)
        null_keys, null_values = self.keys[:, :, self.capacity :], self.values[:, :, self.capacity :]
        self.keys, self.values = self.keys[:, :, : self.capacity], self.values[:, :, : self.capacity]
        keys, values = super().update(key_states, value_states)
        self.keys, self.values = torch.cat([self.keys, null_keys], dim=2), torch.cat([self.values, null_values], dim=2)
        return torch.cat([keys, null_keys], dim=2), torch.cat([values, null_values], dim=2)


class EngineRingLayer(_EngineTurningLayer, RingLayer):
    """A `RingLayer` whose steps write in place."""

    config_names = (*RingLayer.config_names, "null_slots")


class EngineSinkLayer(_EngineTurningLayer, SinkLayer):
    """A `SinkLayer` whose steps write in place."""

    config_names = (*SinkLayer.config_names, "null_slots")


ENGINE_LAYERS: dict[type[KeyValueLayer], type[EngineKeyValueLayer]] = {
    FullLayer: EngineFullLayer,
    RingLayer: EngineRingLayer,
    SinkLayer: EngineSinkLayer,
}
