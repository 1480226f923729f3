"""What policies that write their slots again and again share: rings, and rings behind attention sinks."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from .policy import SlotPolicy

if TYPE_CHECKING:
    import torch


class CircularPolicy(SlotPolicy):
    """Keeps the newest tokens in slots that are written anew on every round; a policy without an end."""

    window: int
    rollback_slots: int

    @property
    def max_length(self) -> None:
        return None

    @property
    @abstractmethod
    def ring(self) -> int:
        """Slots that are written again and again."""

    @property
    @abstractmethod
    def first_round(self) -> int:
        """Length up to which every token is kept in the slot of its position, and seen."""

    def wraps(self, kv_read_len: int | None) -> bool:
        return kv_read_len is None or kv_read_len > self.first_round

    if TYPE_CHECKING:

        @property
        def capacity(self) -> int: ...

    @abstractmethod
    def positions(self, length: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def next_slot(self, length: torch.Tensor) -> torch.Tensor: ...

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        if max_len_ever <= self.capacity:
            return length
        # Past the sinks, slots of positions up to max_len_ever - 1 - ring hold later tokens; the next query needs those
        # from its # own position - window + 1 on.
        return max(0, min(length, length - (max_len_ever - 1 - self.ring + self.window)))


def is_one(query_length: int) -> bool:
    """Whether one new token is all there can be: a decode step, static at that."""
    # A length that torch.export keeps symbolic may be one as well: it takes the general path, which is exact for any.
    return isinstance(query_length, int) and query_length == 1
