"""Layers of every policy in one call, for tests of what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exportable_cache.cache.layers import (
    CacheLayer,
    IndexedLayer,
    IndexerKeys,
    LinearLayer,
    LinearStates,
    RowSizes,
    StateShape,
)
from exportable_cache.cache.policies import FullPolicy, NoPolicy, RecurrentPolicy, RingPolicy, SinkPolicy, SlotPolicy
from exportable_cache.cache.step import StepContext
from exportable_cache.cache.storage import storage_of


def layer_of(
    policy: SlotPolicy,
    batch_size: int = 1,
    num_heads: int = 2,
    head_dim: int = 4,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: str | None = None,
) -> CacheLayer:
    return CacheLayer(policy, storage_of(dtype, kv_dtype), RowSizes(batch_size, num_heads, head_dim, value_head_dim))


def full_layer(batch_size: int, num_heads: int, head_dim: int, capacity: int, **options: Any) -> CacheLayer:
    return layer_of(FullPolicy(capacity), batch_size, num_heads, head_dim, **options)


def ring_layer(
    batch_size: int, num_heads: int, head_dim: int, window: int, slack: int = 0, **options: Any
) -> CacheLayer:
    return layer_of(RingPolicy(window, slack), batch_size, num_heads, head_dim, **options)


def sink_layer(
    batch_size: int, num_heads: int, head_dim: int, sinks: int, window: int, slack: int = 0, **options: Any
) -> CacheLayer:
    return layer_of(SinkPolicy(sinks, window, slack), batch_size, num_heads, head_dim, **options)


def indexed_layer(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    capacity: int,
    index_head_dim: int,
    value_head_dim: int | None = None,
    kv_dtype: str | None = None,
) -> IndexedLayer:
    sizes = RowSizes(batch_size, num_heads, head_dim, value_head_dim)
    storage = storage_of(torch.float32, kv_dtype)
    return IndexedLayer(FullPolicy(capacity), IndexerKeys(index_head_dim, "float32"), storage, sizes)


def linear_layer(
    batch_size: int,
    conv_states: Sequence[StateShape | None],
    recurrent_states: Sequence[StateShape | None],
    policy: SlotPolicy | None = None,
    sizes: RowSizes | None = None,
) -> LinearLayer:
    """States alone, or beside the keys and values of a policy."""
    states = LinearStates.of(conv_states, recurrent_states, torch.float32)
    storage = None if policy is None else storage_of(torch.float32)
    return LinearLayer(policy or RecurrentPolicy(), states, batch_size, storage, sizes)


def dummy_layer() -> CacheLayer:
    return CacheLayer(NoPolicy())


def in_step(layer: CacheLayer, **context: Any) -> CacheLayer:
    """The layer, over the same tensors, in a step of this `StepContext`."""
    return layer.with_state(dict(layer.named_state()), StepContext(**context))
