"""What one layer of a model keeps, as its cache sees it, and the layer that is built for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from .layers import (
    CacheLayer,
    CrossLayer,
    DummyLayer,
    FullLayer,
    HybridFullLayer,
    HybridRingLayer,
    IndexedLayer,
    LinearLayer,
    RingLayer,
    SinkLayer,
    StateShape,
)
from .layers.quantized import QUANTIZED
from .spec import CacheSpec

#: Layer types, by transformers' names: those that keep keys and values, those that keep states, and those that keep both.
KEY_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
STATE_TYPES = ("linear_attention", "conv")
HYBRID_TYPES = ("hybrid", "hybrid_sliding")
SUPPORTED_LAYER_TYPES = (*KEY_TYPES, *STATE_TYPES, *HYBRID_TYPES, "dummy")

#: Our name for the layer type that transformers has none for: attention to an encoder's output.
CROSS_ATTENTION = "cross_attention"


@dataclass(frozen=True)
class LayerLayout:
    """One layer of a model, as its cache sees it.

    `LayerLayout("sliding_attention", num_heads=4, head_dim=64, value_head_dim=64, window=512)` becomes a `RingLayer` of
    512 slots, or a `FullLayer` where `max_cache_len` is no larger than the window.

    Attributes:
        layer_type: Transformers' name, as in `config.layer_types`.
        num_heads: Key and value heads; None where the layer keeps no keys.
        head_dim: Size of a key head.
        value_head_dim: Size of a value head.
        window: Tokens a query attends to at most, itself included: a sliding window or a chunk; None for all.
        index_head_dim: Size of an indexer key, where the layer has an indexer.
        conv_states: Shape of each convolution state, where the layer has any.
        recurrent_states: Shape of each recurrent state.
        encoder_slots: Positions of the longest encoder output, where the layer is one of cross-attention.
    """

    layer_type: str
    num_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    window: int | None = None
    index_head_dim: int | None = None
    conv_states: tuple[StateShape | None, ...] = ()
    recurrent_states: tuple[StateShape | None, ...] = ()
    encoder_slots: int | None = None

    def build(self, spec: CacheSpec, dtype: torch.dtype, device: torch.device | str) -> CacheLayer:
        """Allocate the storage policy of this layer.

        Args:
            spec: Of the cache.
            dtype: Of keys and values.
            device: Where to allocate.
        """
        batch_size, max_cache_len, slack = spec.batch_size, spec.max_cache_len, spec.rollback_slots
        sinks, kv_dtype = spec.sinks, spec.kv_dtype
        states: dict[str, Any] = {"conv_states": self.conv_states, "recurrent_states": self.recurrent_states}
        has_states = any((*self.conv_states, *self.recurrent_states))
        if self.num_heads is None:
            return LinearLayer(batch_size, **states, dtype=dtype, device=device) if has_states else DummyLayer()
        options: dict[str, Any] = {"value_head_dim": self.value_head_dim, "dtype": dtype, "device": device}
        if has_states:
            options |= states
        if kv_dtype is not None and (has_states or self.index_head_dim is not None or self.encoder_slots is not None):
            raise InputError(
                f"kv_dtype is {kv_dtype!r}, but a layer of type {self.layer_type!r} keeps more than keys and values, which is not done in "
                "8 bits; leave kv_dtype out"
            )
        if self.encoder_slots is not None:
            return CrossLayer(batch_size, self.num_heads, self.head_dim, self.encoder_slots, **options)
        if self.index_head_dim is not None:
            return IndexedLayer(
                batch_size, self.num_heads, self.head_dim, max_cache_len, index_head_dim=self.index_head_dim, **options
            )
        if sinks is not None and self.window is None:
            sink = SinkLayer if kv_dtype is None else QUANTIZED[SinkLayer]
            return sink(batch_size, self.num_heads, self.head_dim, sinks.tokens, sinks.window, slack=slack, **options)
        # A window that is never reached needs no ring: every token stays visible, and the slot is the position.
        if self.window is None or (self.window >= max_cache_len and sinks is None):
            full = HybridFullLayer if has_states else FullLayer if kv_dtype is None else QUANTIZED[FullLayer]
            return full(batch_size, self.num_heads, self.head_dim, max_cache_len, **options)
        ring = HybridRingLayer if has_states else RingLayer if kv_dtype is None else QUANTIZED[RingLayer]
        return ring(batch_size, self.num_heads, self.head_dim, self.window, slack=slack, **options)
