"""Policy of full attention: every token is kept, and slot `s` holds position `s`."""

from __future__ import annotations

from dataclasses import dataclass

from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class FullPolicy(SlotPolicy, kind="full"):
    """Policy that keeps up to `capacity` tokens per row; the slot is the position.

    Raises:
        InputError: If `capacity` is not a positive int.
    """

    capacity: int

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a full policy", 1)

    @property
    def max_length(self) -> int:
        """See `SlotPolicy.max_length`."""
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length
