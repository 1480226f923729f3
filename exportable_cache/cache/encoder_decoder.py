"""The cache of an encoder-decoder model, in the protocol of transformers' `EncoderDecoderCache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import EncoderDecoderCache

from ..errors import InputError
from .cache import LayeredCache
from .layers import CrossLayer
from .step import PLAIN

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from .layers import CacheLayer
    from .step import StepContext


# The types differ because transformers annotates lengths as int and both halves as `DynamicCache`, although it takes
# any cache.
class EncoderDecoderLayeredCache(LayeredCache, EncoderDecoderCache):  # type: ignore[misc]
    """A `LayeredCache` that is a transformers `EncoderDecoderCache` too (cache_utils.py, 5.23).

    Its layers are those of the self-attention, followed by as many of the cross-attention. `is_updated` says per
    decoder layer whether the cross-attention's keys and values are there: a model computes them where it is false, and
    reads them where it is true.

    Args:
        layers: Self-attention layers, then one `CrossLayer` for each.

    Raises:
        InputError: If the second half are not the `CrossLayer`s of the first.
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        LayeredCache.__init__(self, layers)
        half = len(self.layers) // 2
        crosses = [isinstance(layer, CrossLayer) for layer in self.layers]
        if crosses != [False] * half + [True] * half:
            raise InputError(
                f"layers are {', '.join(layer.label for layer in self.layers)}; "
                "an encoder-decoder has its self-attention layers first, then as many cross-attention layers"
            )
        self.is_updated = dict.fromkeys(range(half), False)

    @classmethod
    def from_layers(cls, layers: Any) -> Self:
        """See `LayeredCache.from_layers`."""
        cache = super().from_layers(layers)
        cache.is_updated = {}
        return cache

    def __len__(self) -> int:
        """Decoder layers."""
        return len(self.layers) // 2

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layers})"

    @property
    def self_attention_cache(self) -> LayeredCache:  # type: ignore[override]
        """The self-attention layers, shared, as a cache of their own."""
        cache = LayeredCache.from_layers(self.layers[: len(self)])
        cache._config = self._config
        return cache

    @property
    def cross_attention_cache(self) -> LayeredCache:  # type: ignore[override]
        """The cross-attention layers, shared, as a cache of their own."""
        return LayeredCache.from_layers([_Written(layer) for layer in self.cross_layers])

    @property
    def cross_layers(self) -> list[CrossLayer]:
        """The cross-attention layers."""
        # Not filtered by class, because the layers of a rebuilt cache may be any objects.
        layers: Any = self.layers[len(self) :]
        return layers

    @property
    def is_sliding(self) -> list[bool]:
        """See `LayeredCache.is_sliding`."""
        return [layer.is_sliding for layer in self.layers[: len(self)]]

    @property
    def is_linear(self) -> list[bool]:
        """See `LayeredCache.is_linear`."""
        return [False] * len(self)

    @property
    def is_dummy(self) -> list[bool]:
        """See `LayeredCache.is_dummy`."""
        return [False] * len(self)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """See `LayeredCache.get_max_length`."""
        return LayeredCache.get_max_length(self, layer_idx)

    def reset(self) -> None:
        """Empty all layers; the next step computes the cross-attention's keys and values again."""
        for layer in self.layers:
            layer.reset()
        self.is_updated = dict.fromkeys(range(len(self)), False)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of the decoder, see `LayeredCache.crop`; the encoder's output stays."""
        self.self_attention_cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give row `i` the state of row `beam_idx[i]`, in all layers."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Like `reorder_cache`, for as many rows as there are; refused otherwise."""
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the batch size of a static cache is fixed."""
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """See `LayeredCache.with_state`."""
        cache = super().with_state(tensors, context)
        cache.is_updated = dict(self.is_updated)
        return cache


class _Written:
    """A cross layer as models read it in eager use: without the slots after the newest encoder output.

    Models size the mask of their cross-attention by the encoder output at hand. A program gives them one of all slots,
    with a mask, and so reads them all.
    """

    def __init__(self, layer: CrossLayer) -> None:
        self._layer = layer

    @property
    def keys(self) -> torch.Tensor:
        """See `LayeredCache.keys`."""
        return self._layer.keys[:, :, : self._layer.written]

    @property
    def values(self) -> torch.Tensor:
        """See `LayeredCache.values`."""
        return self._layer.values[:, :, : self._layer.written]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
