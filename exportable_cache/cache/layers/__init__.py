"""Cache layers: what one attention layer keeps, composed of a slot policy, a storage and a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...pytree import register_node
from ..policies import CrossPolicy, ItemsPolicy, PromptPolicy
from .cross import CrossLayer, ItemsLayer
from .indexed import IndexedLayer, IndexerKeys
from .layer import CacheLayer, PromptLayer, RowSizes
from .linear import LinearLayer, LinearStates, StateShape

if TYPE_CHECKING:
    from ..storage import Storage

__all__ = [
    "CacheLayer",
    "CrossLayer",
    "IndexedLayer",
    "IndexerKeys",
    "ItemsLayer",
    "LinearLayer",
    "LinearStates",
    "PromptLayer",
    "RowSizes",
    "StateShape",
    "layer_class",
    "layer_from",
    "register_layer",
    "rounding_storage",
]


def layer_class(config: Mapping[str, Any]) -> type[CacheLayer]:
    """Return the class of a layer from what its `CacheLayer.config` has besides keys and values.

    Raises:
        InputError: If the config has no policy.
    """
    if not isinstance(config.get("policy"), Mapping):
        raise InputError(f"a layer has {', '.join(config) or 'nothing'}, it needs a policy")
    if "states" in config:
        return LinearLayer
    if "indexer" in config:
        return IndexedLayer
    of_policy = {CrossPolicy.kind: CrossLayer, ItemsPolicy.kind: ItemsLayer, PromptPolicy.kind: PromptLayer}
    kind = config["policy"].get("kind")
    return of_policy.get(kind, CacheLayer) if isinstance(kind, str) else CacheLayer


def layer_from(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> CacheLayer:
    """Return a layer rebuilt around existing tensors, see `CacheLayer.from_state`."""
    return layer_class(config).from_state(config, tensors)


def rounding_storage(layers: Iterable[CacheLayer]) -> Storage | None:
    """Return the first storage that keeps fewer bits than the model writes, or None."""
    found = (layer.storage for layer in layers if layer.storage is not None and layer.storage.rounds)
    return next(found, None)


def register_layer(cls: type[CacheLayer], rebuilt_as: type[CacheLayer] | None = None) -> None:
    """Register a class of layers as pytree nodes.

    Args:
        cls: The class.
        rebuilt_as: Class of the unflattened layers; the same class by default.
    """
    register_node(
        cls,
        lambda layer: (list(layer.named_state()), layer.config()),
        lambda children, config: _unflatten(rebuilt_as or cls, children, config),
        name=f"exportable_cache.{cls.__name__}",
    )


def _unflatten(cls: type[CacheLayer], children: list[Any], config: Mapping[str, Any]) -> CacheLayer:
    layer = cls.from_state(config, {})
    for name, child in zip(layer.state, children, strict=True):
        setattr(layer, name, child)
    return layer


for _class in (CacheLayer, CrossLayer, IndexedLayer, ItemsLayer, LinearLayer, PromptLayer):
    register_layer(_class)
