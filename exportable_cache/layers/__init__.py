"""Storage policies: what one attention layer keeps, where a new token is written, and which position each slot holds."""

from .full import FullLayer
from .key_value import KeyValueLayer
from .layer import CacheLayer, StateTensor
from .ring import RingLayer
from .sink import SinkLayer

__all__ = ["CacheLayer", "FullLayer", "KeyValueLayer", "RingLayer", "SinkLayer", "StateTensor"]
