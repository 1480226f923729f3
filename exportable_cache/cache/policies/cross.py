"""Policies of cross-attention: over an encoder's output, and over images between layers of self-attention."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class CrossPolicy(SlotPolicy, kind="cross"):
    """Keeps up to `capacity` encoder positions per row, from slot 0 on; how many are real is a length of its own.

    Decoder tokens do not move it: rolling the decoder back leaves it alone, and a new encoder output is written over
    the old one.

    Raises:
        InputError: If `capacity`, the longest encoder output, is not a positive int.
    """

    capacity: int

    follows_decoder = False
    length_name = "encoder_length"

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a cross policy", 1)

    @property
    def max_length(self) -> None:
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length


@dataclass(frozen=True)
class ItemsPolicy(SlotPolicy, kind="items"):
    """Keeps `items` pictures of `item_slots` positions each, the first from slot 0 on, and a last slot that stays zero.

    A token that sees no picture attends to the last slot alone, whose value is zero: as if the layer were not there.
    Which pictures a token sees is an input of its step, so going back leaves this layer alone.

    Attributes:
        item_slots: Positions of one picture.
        items: Pictures.

    Raises:
        InputError: If one is not a positive int.
    """

    item_slots: int
    items: int

    follows_decoder = False

    def __post_init__(self) -> None:
        check_count(self.item_slots, "item_slots of an items policy", 1)
        check_count(self.items, "items of an items policy", 1)

    @classmethod
    def within(cls, item_slots: int, slots: int | None) -> ItemsPolicy:
        """As many pictures as `slots` have room for, 2 by default.

        Raises:
            InputError: If there is no room for one.
        """
        if slots is None:
            return cls(item_slots, 2)
        if slots < item_slots:
            raise InputError(
                f"max_encoder_len is {slots}, a picture of this model takes {item_slots} slots of its cross-attention "
                f"layers; pass {item_slots} for each, or leave it out for two"
            )
        return cls(item_slots, slots // item_slots)

    @property
    def capacity(self) -> int:
        return self.items * self.item_slots + 1

    @property
    def max_length(self) -> None:
        return None

    def slots_read(self, kv_read_len: int | None) -> int:
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length
