"""Cache layers: what one attention layer keeps, composed of a slot policy, a storage and a kernel."""

from .composed import RowSizes, label_of
from .cross import CrossLayer, ItemsLayer
from .indexed import IndexedLayer, IndexerKeys
from .layer import CacheLayer
from .linear import LinearLayer, LinearStates, StateShape
from .make import layer_class, layer_from, rounding_storage
from .prompt import PromptLayer

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
    "label_of",
    "layer_class",
    "layer_from",
    "rounding_storage",
]
