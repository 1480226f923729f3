"""Cache layers whose writes stay one node, `kv_cache_update`, for TensorRT to do in place. They exist in traced programs only."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...cache import ExportableCache
from ...errors import UnsupportedModelError
from ...layers import FullLayer, RingLayer
from ...layers.ring import is_one
from ...ops.kv_cache_update import kv_cache_update


class EngineFullLayer(FullLayer):
    """A `FullLayer` that writes through `kv_cache_update`."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FullLayer.update`; the tensors are rebound, not mutated."""
        self.keys = kv_cache_update(self.keys, key_states, self.cumulative_length)
        self.values = kv_cache_update(self.values, value_states, self.cumulative_length)
        self.advance(key_states.shape[2])
        return self.keys, self.values


class EngineRingLayer(RingLayer):
    """A `RingLayer` whose one-token write goes through `kv_cache_update`, at `remainder(length, capacity)`.

    A prompt's write gathers the newest tokens, as in any ring: it reads the cache and the new tokens together, which no
    layer of TensorRT does in place.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RingLayer.update`; the tensors are rebound, not mutated."""
        if not is_one(key_states.shape[2]):
            return super().update(key_states, value_states, *args, **kwargs)
        slot = torch.remainder(self.cumulative_length, self.capacity)
        self.keys = kv_cache_update(self.keys, key_states, slot)
        self.values = kv_cache_update(self.values, value_states, slot)
        self.advance(1)
        return self.keys, self.values


_ENGINE_LAYERS = {FullLayer: EngineFullLayer, RingLayer: EngineRingLayer}


def engine_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """The cache with its layers as TensorRT programs keep them; shapes and contents are the same.

    Layers of other kinds stay as they are: if their operators convert, their state is copied in every step.

    Raises:
        UnsupportedModelError: If the model is an encoder-decoder.
    """
    if type(cache) is not ExportableCache:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps an encoder's output beside its tokens, which has no TensorRT form yet; "
            "export for another target"
        )
    return ExportableCache([
        _ENGINE_LAYERS[type(layer)].from_state(layer.config(), dict(layer.named_state()))
        if type(layer) in _ENGINE_LAYERS
        else layer
        for layer in cache.layers
    ])
