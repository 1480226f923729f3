"""Fused layers that keep keys and values in 8 bits: written by the same operators, and read as far as they are filled.

ExecuTorch's own attention over such a cache, `llama::custom_quantized_sdpa`, rounds the queries as well, and is 2.5 times as slow
as the one in float32 on a full cache here. So the filled slots are made float32 by one kernel, into memory that all layers
share, and attended to by the operator that float caches use.
"""

from __future__ import annotations

import torch

from ...cache.layers import QuantizedKeyValueLayer, QuantizedRingLayer, StateTensor
from ...cache.layers.quantized import QuantizedFullLayer, quantize_rows
from .fused_layers import FusedFullLayer, FusedRingLayer, heads_as_batch

_PARTS = ("keys", "values", "key_scales", "value_scales")


def _state(slots: str) -> dict[str, StateTensor]:
    sizes = ("num_heads", slots, "batch_size")
    return {
        "keys": StateTensor(*sizes, "head_dim", dtype=torch.int8),
        "values": StateTensor(*sizes, "value_head_dim", dtype=torch.int8),
        "key_scales": StateTensor(*sizes, "scale", dtype=torch.float32),
        "value_scales": StateTensor(*sizes, "scale", dtype=torch.float32),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }


class _RoundedRows(QuantizedKeyValueLayer):
    """What both layers write: rows of int8 and their scales, [num_heads, length, 1, head_dim] and [num_heads, length, 1, 1]."""

    def _rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (keys, key_scales), (values, value_scales) = (
            quantize_rows(heads_as_batch(rows)) for rows in (key_states, value_states)
        )
        return keys, values, key_scales, value_scales


class FusedQuantizedFullLayer(_RoundedRows, FusedFullLayer):
    """A `FusedFullLayer` in 8 bits: keys and values int8, scales float32 [num_heads, capacity, 1, 1]."""

    parts = _PARTS
    state = _state("capacity")
    config_names = QuantizedFullLayer.config_names


class FusedQuantizedRingLayer(_RoundedRows, FusedRingLayer):
    """A `FusedRingLayer` in 8 bits: keys and values int8, scales float32 [num_heads, capacity + 1, 1, 1]."""

    parts = _PARTS
    state = _state("slots")
    config_names = QuantizedRingLayer.config_names
