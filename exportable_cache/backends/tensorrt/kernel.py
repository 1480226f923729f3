"""Writes that stay one node, `kv_cache_update`, for TensorRT to do in place. They exist in traced programs only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from ...cache.component import check_count
from ...cache.kernel import PORTABLE, Kernel
from ...cache.policies.circular import CircularPolicy, is_one
from .kv_cache_update import kv_cache_update

if TYPE_CHECKING:
    from ...cache.layers import CacheLayer
    from ...cache.policies import SlotPolicy


@dataclass(frozen=True)
class EngineKernel(Kernel, kind="tensorrt"):
    """Writes float keys and values through `kv_cache_update`, and may keep a null slot.

    TensorRT's attention layer knows no sinks, but a key of zeros has the score that the mask gives it, and a value of
    zeros adds nothing: one slot that is never written, under a mask that holds each head's sink logit there, makes its
    softmax one with a sink. The slot is the last of the tensors and of what `update` returns, no part of the policy's
    capacity, and seen by attention alone: positions, masks and bounds do not count it.

    Of what overwrites its oldest tokens, one token is written so, at the policy's next slot. A prompt's write gathers
    the newest tokens: it reads the cache and the new tokens together, which no layer of TensorRT does in place.

    Attributes:
        null_slots: 1 where the layer's attention has sinks, 0 elsewhere.

    Raises:
        InputError: If `null_slots` is not an int of at least 0.
    """

    null_slots: int = 0

    def __post_init__(self) -> None:
        check_count(self.null_slots, "null_slots of a TensorRT kernel", 0)

    def sizes(self, policy: SlotPolicy) -> Mapping[str, int]:
        return {"capacity": policy.capacity + self.null_slots}

    def engine_layer(self, layer: CacheLayer) -> CacheLayer:
        """The layer with this kernel, with the same contents."""
        tensors = dict(layer.named_state())
        for name in layer.storage.parts:
            tensors[name] = F.pad(tensors[name], (0, 0, 0, self.null_slots))
        return layer.with_kernel(self, tensors)

    def update(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.update`; the tensors are rebound, not mutated."""
        policy = layer.policy
        if isinstance(policy, CircularPolicy) and not is_one(key_states.shape[2]):
            return self._gather(layer, key_states, value_states)
        start = policy.next_slot(layer.cumulative_length)
        layer.keys = kv_cache_update(layer.keys, key_states, start)
        layer.values = kv_cache_update(layer.values, value_states, start)
        layer.advance(key_states.shape[2])
        return layer.keys, layer.values

    def _gather(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.null_slots:
            return PORTABLE.update(layer, key_states, value_states)
        capacity = layer.capacity
        null_keys, null_values = layer.keys[:, :, capacity:], layer.values[:, :, capacity:]
        layer.keys, layer.values = layer.keys[:, :, :capacity], layer.values[:, :, :capacity]
        keys, values = PORTABLE.update(layer, key_states, value_states)
        layer.keys, layer.values = (
            torch.cat([layer.keys, null_keys], dim=2),
            torch.cat([layer.values, null_values], dim=2),
        )
        return torch.cat([keys, null_keys], dim=2), torch.cat([values, null_values], dim=2)
