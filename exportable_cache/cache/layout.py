"""What one layer of a model keeps, as its cache sees it, and the layer that is built for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InputError
from .layers import CacheLayer, CrossLayer, IndexedLayer, IndexerKeys, LinearLayer, LinearStates, RowSizes, StateShape
from .policies import CrossPolicy, FullPolicy, NoPolicy, RecurrentPolicy, RingPolicy, SinkPolicy, SlotPolicy
from .storage import storage_of

#: Layer types, by transformers' names: those that keep keys and values, those that keep states, and those that keep
#: both.
KEY_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
STATE_TYPES = ("linear_attention", "conv")
HYBRID_TYPES = ("hybrid", "hybrid_sliding")
SUPPORTED_LAYER_TYPES = (*KEY_TYPES, *STATE_TYPES, *HYBRID_TYPES, "dummy")

#: Our name for the layer type that transformers has none for: attention to an encoder's output.
CROSS_ATTENTION = "cross_attention"


@dataclass(frozen=True)
class Sinks:
    """What full-attention layers keep when they are to run without end: `Sinks(4, 1020)` is the first 4 tokens and the
    last 1020.

    Raises:
        InputError: If a number is not a positive int.
    """

    tokens: int
    window: int

    def __post_init__(self) -> None:
        for name, value in (("attention_sinks", self.tokens), ("attention_window", self.window)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be an int of at least 1")

    @classmethod
    def within(cls, max_cache_len: int, tokens: int | None, window: int | None) -> Sinks | None:
        """From the options `attention_sinks` and `attention_window`, None where neither is given.

        Args:
            max_cache_len: Slots that a layer may have; the window takes what the sinks leave of them by default.

        Raises:
            InputError: If there is a window without sinks, or both do not fit.
        """
        if tokens is None:
            if window is not None:
                raise InputError(
                    f"attention_window is {window}, but there are no attention_sinks; pass them too, 4 is common"
                )
            return None
        if window is None and isinstance(tokens, int) and isinstance(max_cache_len, int):
            window = max_cache_len - tokens
        if (
            window is not None
            and isinstance(window, int)
            and isinstance(tokens, int)
            and tokens + max(window, 1) > max_cache_len
        ):
            raise InputError(
                f"attention_sinks {tokens} and attention_window {max(window, 1)} take {tokens + max(window, 1)} slots, max_cache_len is "
                f"{max_cache_len}; raise max_cache_len, or lower them"
            )
        return cls(tokens, window)


@dataclass(frozen=True)
class LayerLayout:
    """One layer of a model, as its cache sees it.

    `LayerLayout("sliding_attention", num_heads=4, head_dim=64, value_head_dim=64, window=512)` becomes a ring of 512
    slots, or a full layer where `max_cache_len` is no larger than the window.

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

    def build(
        self,
        batch_size: int,
        max_cache_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        slack: int = 0,
        sinks: Sinks | None = None,
        kv_dtype: str | None = None,
    ) -> CacheLayer:
        """Allocate this layer.

        Raises:
            InputError: If it cannot be kept in `kv_dtype`.
        """
        states = None
        if any((*self.conv_states, *self.recurrent_states)):
            states = LinearStates.of(self.conv_states, self.recurrent_states, dtype)
        if self.num_heads is None:
            if states is None:
                return CacheLayer(NoPolicy())
            return LinearLayer(RecurrentPolicy(), states, batch_size, device=device)
        policy = self._policy(max_cache_len, slack, sinks)
        storage = storage_of(dtype, kv_dtype)
        sizes = RowSizes(batch_size, self.num_heads, self.head_dim, self.value_head_dim)
        if states is not None:
            return LinearLayer(policy, states, batch_size, storage, sizes, device=device)
        if self.index_head_dim is not None:
            indexer = IndexerKeys(self.index_head_dim, storage.dtype)
            return IndexedLayer(policy, indexer, storage, sizes, device=device)
        if self.encoder_slots is not None and storage.rounds:
            raise InputError(
                f"kv_dtype is {kv_dtype!r}, but models read the keys and values of cross-attention as they are; leave kv_dtype out"
            )
        return (CacheLayer if self.encoder_slots is None else CrossLayer)(policy, storage, sizes, device=device)

    def _policy(self, max_cache_len: int, slack: int, sinks: Sinks | None) -> SlotPolicy:
        if self.encoder_slots is not None:
            return CrossPolicy(self.encoder_slots)
        if self.index_head_dim is not None:
            return FullPolicy(max_cache_len)
        if sinks is not None and self.window is None:
            return SinkPolicy(sinks.tokens, sinks.window, slack)
        # A window that is never reached needs no ring: every token stays visible, and the slot is the position.
        if self.window is None or (self.window >= max_cache_len and sinks is None):
            return FullPolicy(max_cache_len)
        return RingPolicy(self.window, slack)
