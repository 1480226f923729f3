"""Slot policies: which slot a new token goes to, which position each slot holds, and what can be taken back."""

from .cross import CrossPolicy
from .full import FullPolicy
from .items import ItemsPolicy
from .none import NoPolicy
from .policy import SlotPolicy
from .prompt import PromptPolicy
from .recurrent import RecurrentPolicy
from .ring import RingPolicy
from .sinks import SinkPolicy
from .split import SplitPolicy

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
    "SplitPolicy",
]
