"""KV_CACHE_UPDATE: new keys or values written into a cache that input and output share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from .layer import layer_kind

if TYPE_CHECKING:
    import torch

    from .layer import Compute, NetworkLayer


@layer_kind(
    "KV_CACHE_UPDATE",
    "IKVCacheUpdateLayer",
    expects={"cache_mode": "LINEAR", "update_form": "PADDED_BHND", "update_lengths": None},
    inputs=(3, 3),
    same_dtype=(0, 1),
)
def kv_cache_update(layer: NetworkLayer) -> Compute:
    """`cache[i, :, start[i] + s] = update[i, :, s]`: cache [batch, heads, capacity, dim], update [batch, heads, q,
    dim], start [batch]. TensorRT checks no bound at run time; here a write past the end is an error.
    """

    def compute(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        length, capacity = update.shape[2], cache.shape[2]
        if start.shape != (len(cache),) or update.shape[:2] != cache.shape[:2] or update.shape[3:] != cache.shape[3:]:
            raise layer.wrong(f"writes {list(update.shape)} at {list(start.shape)} into {list(cache.shape)}")
        result = cache.clone()
        for row, first in enumerate(start.tolist()):
            if not 0 <= first <= capacity - length:
                raise layer.wrong(f"writes {length} tokens at {first} into a cache of {capacity} slots")
            result[row, :, first : first + length] = update[row]
        return result

    return compute


def check_aliases(layers: Sequence[NetworkLayer], inputs: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """Output name -> input name of every cache that is updated in place.

    Raises:
        VerificationError: If a cache is no network input, its update no network output, or anything else reads the
            cache: it shares its memory with the update, and which of the two states a reader would see is undefined.
    """
    aliases: dict[str, str] = {}
    for layer in layers:
        if layer.kind != "KV_CACHE_UPDATE":
            continue
        cache, updated = layer.inputs[0].name, layer.outputs[0].name
        if cache not in inputs or updated not in outputs:
            raise layer.wrong("updates a cache that is not a network input, or whose update is not a network output")
        readers = [(other, index) for other in layers for index, t in enumerate(other.inputs) if t and t.name == cache]
        if len(readers) > 1:
            other = next((other for other, index in readers if other is not layer), layer)
            raise layer.wrong(f"updates {cache!r} in place while {other} reads it")
        aliases[updated] = cache
    return aliases
