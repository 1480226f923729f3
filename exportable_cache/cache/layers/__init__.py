"""Storage policies: what one attention layer keeps, where a new token is written, and which position each slot holds."""

from .cross import CrossLayer
from .dummy import DummyLayer
from .full import FullLayer
from .hybrid import HybridFullLayer, HybridRingLayer
from .indexed import IndexedLayer
from .key_value import KeyValueLayer
from .layer import CacheLayer, StateTensor
from .linear import LinearLayer, LinearStates, StateShape
from .quantized import QuantizedFullLayer, QuantizedKeyValueLayer, QuantizedRingLayer, QuantizedSinkLayer
from .ring import RingLayer
from .sink import SinkLayer

__all__ = [
    "CacheLayer",
    "CrossLayer",
    "DummyLayer",
    "FullLayer",
    "HybridFullLayer",
    "HybridRingLayer",
    "IndexedLayer",
    "KeyValueLayer",
    "LinearLayer",
    "LinearStates",
    "QuantizedFullLayer",
    "QuantizedKeyValueLayer",
    "QuantizedRingLayer",
    "QuantizedSinkLayer",
    "RingLayer",
    "SinkLayer",
    "StateShape",
    "StateTensor",
]
