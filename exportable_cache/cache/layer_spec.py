"""Specs of what the layers of a model keep, and the cache layers that are built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layers import (
    CacheLayer,
    CrossLayer,
    IndexedLayer,
    IndexerKeys,
    ItemsLayer,
    LinearLayer,
    LinearStates,
    PromptLayer,
    RowSizes,
)
from .policies import (
    CrossPolicy,
    FullPolicy,
    ItemsPolicy,
    NoPolicy,
    PromptPolicy,
    RecurrentPolicy,
    RingPolicy,
    SinkPolicy,
)
from .storage import storage_of

if TYPE_CHECKING:
    import torch

    from .layers import StateShape
    from .policies import SlotPolicy
    from .spec import CacheSpec

#: Transformers' name for a window of what follows the prompt, which is seen as a whole.
PROMPT_TYPE = "reference_sliding_attention"
#: Transformers' names for layers with an indexer, which selects tokens, or blocks of tokens (MiniMax M3).
INDEXED_TYPES = ("indexed_attention", "minimax_m3_sparse")
#: Layer types, by transformers' names: those that keep keys and values, those that keep states, and those that keep
#: both.
KEY_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *INDEXED_TYPES, PROMPT_TYPE)
#: Of them, those that need a window.
WINDOWED_TYPES = ("sliding_attention", "chunked_attention", "hybrid_sliding", PROMPT_TYPE)
STATE_TYPES = ("linear_attention", "conv")
HYBRID_TYPES = ("hybrid", "hybrid_sliding")
SUPPORTED_LAYER_TYPES = (*KEY_TYPES, *STATE_TYPES, *HYBRID_TYPES, "dummy")

#: Positions whose states a draft head keeps, one more than the tokens that it can propose at once.
KEPT_POSITIONS = 16
#: Tokens that it proposes at once by default.
DRAFTED = 3

#: Our name for the layer type that transformers has none for: attention to an encoder's output.
CROSS_ATTENTION = "cross_attention"


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model, as its cache sees it.

    `LayerSpec("sliding_attention", num_heads=4, head_dim=64, value_head_dim=64, window=512)` becomes a ring of 512
    slots, or a full layer where `max_cache_len` is smaller than the window.

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
        item_slots: Positions of an image, for a layer of cross-attention to images.
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
    item_slots: int | None = None

    def build(self, spec: CacheSpec, dtype: torch.dtype, device: torch.device | str) -> CacheLayer:
        """Allocate this layer.

        Args:
            spec: Of the cache.
            dtype: Of keys and values.
            device: Where to allocate.

        Raises:
            InputError: If `dtype` is not a floating dtype.
        """
        # Keys of an encoder and of images are never rounded, because models read them directly; nor are an indexer's.
        is_exact = self.encoder_slots is not None or self.item_slots is not None or self.keeps_indexer_only
        batch_size, kv_dtype = spec.batch_size, None if is_exact else spec.kv_dtype
        states = None
        if any((*self.conv_states, *self.recurrent_states)):
            states = LinearStates.of(self.conv_states, self.recurrent_states, dtype)
        if self.num_heads is None:
            if states is None:
                return CacheLayer(NoPolicy())
            return LinearLayer(RecurrentPolicy(), states, batch_size, device=device)
        policy = self._policy(spec)
        storage = storage_of(dtype, kv_dtype)
        assert self.head_dim is not None
        sizes = RowSizes(batch_size, self.num_heads, self.head_dim, self.value_head_dim)
        if states is not None:
            return LinearLayer(policy, states, batch_size, storage, sizes, device=device)
        if self.index_head_dim is not None:
            assert isinstance(policy, FullPolicy)
            indexer = IndexerKeys(self.index_head_dim, storage.dtype)
            return IndexedLayer(policy, indexer, storage, sizes, device=device)
        if self.layer_type == PROMPT_TYPE:
            return PromptLayer(policy, storage, sizes, device=device)
        made = {CrossPolicy: CrossLayer, ItemsPolicy: ItemsLayer}.get(type(policy), CacheLayer)
        return made(policy, storage, sizes, device=device)

    @property
    def keeps_indexer_only(self) -> bool:
        """True if the keys are an indexer's, see `CacheLayer.update_indexer`."""
        return self.layer_type in INDEXED_TYPES and self.value_head_dim == 0 and self.index_head_dim is None

    def _policy(self, spec: CacheSpec) -> SlotPolicy:
        max_cache_len, sinks = spec.max_cache_len, spec.sinks
        if self.item_slots is not None:
            return ItemsPolicy.within(self.item_slots, spec.max_encoder_len)
        if self.encoder_slots is not None:
            return CrossPolicy(self.encoder_slots)
        if self.index_head_dim is not None:
            return FullPolicy(max_cache_len)
        if self.layer_type == PROMPT_TYPE:
            assert self.window is not None
            return PromptPolicy(max_cache_len, self.window)
        if sinks is not None and self.window is None:
            return SinkPolicy(sinks.tokens, sinks.window, spec.rollback_slots)
        # A window that is never reached needs no ring: every token stays visible, and the slot is the position.
        if self.window is None or (self.window > max_cache_len and sinks is None):
            return FullPolicy(max_cache_len)
        return RingPolicy(self.window, spec.rollback_slots)
