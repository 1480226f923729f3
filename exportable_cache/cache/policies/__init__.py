"""Slot policies: the slot of a new token, the position that each slot holds, and the tokens that can be removed."""

from .cross import CrossPolicy, ItemsPolicy
from .full import FullPolicy
from .keyless import NoPolicy, RecurrentPolicy
from .policy import SlotPolicy
from .prompt import PromptPolicy
from .ring import RingPolicy
from .sinks import SinkPolicy

__all__ = [
    "CrossPolicy",
    "FullPolicy",
    "ItemsPolicy",
    "NoPolicy",
    "PromptPolicy",
    "RecurrentPolicy",
    "RingPolicy",
    "SinkPolicy",
    "SlotPolicy",
]
