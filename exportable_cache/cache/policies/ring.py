"""Circular policies, which keep the newest tokens in reused slots, and the ring of sliding-window attention."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..component import check_count
from .policy import SlotPolicy


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


@dataclass(frozen=True)
class RingPolicy(CircularPolicy, kind="ring"):
    """Keeps the newest `window + rollback_slots` tokens per row; position `p` lives in slot `p % capacity`.

    With n tokens seen, slot s holds position `n - 1 - (n - 1 - s) % capacity`, negative meaning empty. Neither any
    number of tokens nor any prompt length is a special case, so one graph serves them all. An attention chunk is kept
    in a ring as well: what of it a query sees is the model's mask function's part.

    Attributes:
        window: Tokens a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be taken back past the window.

    Raises:
        InputError: If `window` is not a positive int or `rollback_slots` a negative one.
    """

    window: int
    rollback_slots: int = 0

    is_sliding = True

    def __post_init__(self) -> None:
        check_count(self.window, "window of a ring", 1)
        check_count(self.rollback_slots, "rollback_slots of a ring", 0)

    @property
    def capacity(self) -> int:
        return self.window + self.rollback_slots

    @property
    def ring(self) -> int:
        return self.capacity

    @property
    def first_round(self) -> int:
        return self.capacity

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        return torch.remainder(length, self.capacity)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # `newest - slot` may be as low as -capacity. One capacity is added so that the dividend is never negative:
        # ExecuTorch's integer remainder takes the dividend's sign, torch's the divisor's.
        return newest - torch.remainder(newest - slot + self.capacity, self.capacity)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        if not self.wraps(kv_read_len):
            return None
        if not is_one(query_length):
            return self.positions_beside_new(length, query_length)
        after = length[:, None] + 1
        positions = self.positions(after)
        return torch.where(positions < 0, after, positions)

    def positions_beside_new(self, length: torch.Tensor, query_length: int) -> torch.Tensor:
        """Positions of the slots before a step, and of its new tokens behind them: int64 [batch_size, capacity +
        query_length].
        """
        length = length[:, None]
        old = self.positions(length)
        new = length + torch.arange(query_length, device=length.device)
        return torch.cat([torch.where(old < 0, length + query_length, old), new], dim=1)
