"""Slot policies: which slot a new token goes to, which position each slot holds, and what can be taken back."""

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
