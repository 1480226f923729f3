"""Policies of cross-attention: over an encoder's output, and over images between layers of self-attention."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class CrossPolicy(SlotPolicy, kind="cross"):
    """Policy that keeps up to `capacity` encoder positions per row, from slot 0 on, and counts them separately.

    Decoder tokens do not change it: a rollback of the decoder leaves it alone, and a new encoder output overwrites the
    old one.

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
        """See `SlotPolicy.max_length`."""
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length


@dataclass(frozen=True)
class ItemsPolicy(SlotPolicy, kind="items"):
    """Policy that keeps `items` images of `item_slots` positions each, from slot 0 on, and a last slot that stays zero.

    A token that sees no image attends to the last slot only, whose value is zero: as if the layer were not there.
    The images that a token sees are an input of its step, so a rollback leaves this layer alone.

    Attributes:
        item_slots: Positions of one image.
        items: Number of images.

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
        """Return the policy for the images that fit in `slots`, 2 by default.

        Raises:
            InputError: If not one image fits.
        """
        if slots is None:
            return cls(item_slots, 2)
        if slots < item_slots:
            raise InputError(
                f"max_encoder_len must be at least {item_slots}, the slots of one image of this model, got {slots}; "
                f"pass {item_slots} for each image, or leave it out for two"
            )
        return cls(item_slots, slots // item_slots)

    @property
    def capacity(self) -> int:
        """See `SlotPolicy.capacity`."""
        return self.items * self.item_slots + 1

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    def slots_read(self, kv_read_len: int | None) -> int:
        """See `SlotPolicy.slots_read`."""
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length
