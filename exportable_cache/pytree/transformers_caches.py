"""Registers transformers' own caches and cache layers, in the form of the installed release.

    register_transformers_caches()
    torch.export.export(model, (), {"input_ids": ids, "past_key_values": cache})    # .layers[0].keys, .layers[0].values

`dynamic_shapes` follows the children: `[[[{2: tokens}, {2: tokens}], ...]]` for a cache of layers with keys and values.
Leaves come layer by layer, and the spec is the same at every step once the tensors exist: an allocated static cache has
one spec for life; a lazy one, and the `is_updated` flags of an encoder-decoder, change it with the first token, because
the program does.

Three layouts are served by looking at the classes, not at the version: lists of tensors on the cache (4.52:
`.key_cache[0]`), layers (4.57: `.layers[0].keys`), and layers that also hold linear-attention states, indexer keys and
lengths that are tensors (5.23). What an object is made of is read from the object, see `object_state.py`.

Why not transformers' own registrations (`integrations/executorch.py`, PR 36311; `exporters/exporter_dynamo.py`):
the first knows DynamicCache alone, keys it `['key_cache'][0]`, forgets the window of sliding layers (4.57) or their
length past it (5.23), and in 4.52 its FX spec disagrees with its pytree; the second has nameless children and keeps
lengths, dtypes and devices in the context, so the spec of a sliding layer changes at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from . import object_state
from .registry import Registration, owner_of, register_node

# Absent names are skipped. Left out on purpose: offloading caches (they hold device streams) and quantised layers
# (their states are objects of other libraries), whose use as a program input torch.export refuses by name.
LAYER_NAMES = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DynamicIndexedLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "StaticIndexedLayer",
    "SlidingWindowLayer",
    "ChunkedSlidingLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
    "DummyLayer",
)
CACHE_NAMES = (
    "DynamicCache",
    "StaticCache",
    "EncoderDecoderCache",
    "SlidingWindowCache",
    "HybridCache",
    "HybridChunkedCache",
    "MambaCache",
    "MtpCache",
    "DFlashCache",
)


def register_transformers_caches(*, replace: bool | None = None) -> list[Registration]:
    """Make transformers' caches and layers pytree nodes, each rebuilt as the class it was.

    Explicit, never on import: from then on a cache inside a model output is taken apart by everything that maps over
    outputs, and what comes out of a `tree_map` is a new cache object around the mapped tensors.

    transformers and tools that register the same classes later (`register_dynamic_cache_export_support`, the exporters,
    TICO) find them registered and use ours. Programs they saved before carry their names and contexts and need
    their registrations to load; ours are saved under names that start with "exportable_cache:".

    Args:
        replace: what to do with a class that is registered already. None replaces transformers' own registrations and
            keeps those of other packages; True replaces all; False keeps all. A kept one gets the FX spec it lacks.

    Returns:
        One entry per class of the installed release, saying what was done.
    """
    return [register_cache_class(cls, replace=replace) for cls in cache_classes()]


def register_cache_class(cls: type, *, replace: bool | None = None) -> Registration:
    """Register one class, such as a cache or layer that a model file derives from transformers' own.

    Raises:
        TypeError: later, when an object of the class is flattened and has an attribute that is neither a known tensor
            of a cache nor JSON; the message names it.
    """
    flatten, unflatten = _functions_for(cls)
    if replace is None:
        replace = owner_of(cls) == cls.__module__.partition(".")[0]
    name = f"exportable_cache:{cls.__module__}.{cls.__qualname__}"
    return register_node(cls, flatten, unflatten, name=name, replace=replace)


def cache_classes() -> Iterator[type]:
    """Yield the layers, then the caches, of the installed transformers, without deprecated aliases."""
    from transformers import cache_utils

    seen: set[type] = set()
    for name in (*LAYER_NAMES, *CACHE_NAMES):
        cls = getattr(cache_utils, name, None)
        if isinstance(cls, type) and cls not in seen:
            seen.add(cls)
            yield cls


@cache  # the same functions at every call, by which `register_node` knows that nothing changed
def _functions_for(cls: type):
    return object_state.flatten_object, lambda children, context: object_state.unflatten_object(cls, children, context)
