"""Full attention: every token is kept, slot `s` holds position `s`."""

from __future__ import annotations

from dataclasses import dataclass

from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class FullPolicy(SlotPolicy, kind="full"):
    """Keeps up to `capacity` tokens per row; the slot is the position.

    Raises:
        InputError: If `capacity` is not a positive int.
    """

    capacity: int

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a full policy", 1)

    @property
    def max_length(self) -> int:
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length
