"""Circular policies, which keep the newest tokens in reused slots, and the ring of sliding-window attention."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..component import check_count
from ..storage.slots import aligned_positions
from .policy import SlotPolicy


class CircularPolicy(SlotPolicy):
    """Policy that keeps the newest tokens in slots that are reused, without a limit of length."""

    window: int
    rollback_slots: int

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    @property
    @abstractmethod
    def ring(self) -> int:
        """Number of slots that are reused."""

    @property
    @abstractmethod
    def first_round(self) -> int:
        """Length up to which slot `s` holds position `s` and every token is visible."""

    def wraps(self, kv_read_len: int | None) -> bool:
        """See `SlotPolicy.wraps`."""
        return kv_read_len is None or kv_read_len > self.first_round

    if TYPE_CHECKING:

        @property
        def capacity(self) -> int:
            """See `SlotPolicy.capacity`."""

    @abstractmethod
    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""

    @abstractmethod
    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        if max_len_ever <= self.capacity:
            return length
        # Past the sinks, slots of positions up to max_len_ever - 1 - ring hold later tokens; the next query needs those
        # from its own position - window + 1 on.
        return max(0, min(length, length - (max_len_ever - 1 - self.ring + self.window)))


def is_one(query_length: int) -> bool:
    """Return True if the step has a static length of one token: a decode step."""
    # A symbolic length of torch.export may be 1 as well: it takes the general path, which is exact for any length.
    return isinstance(query_length, int) and query_length == 1


@dataclass(frozen=True)
class RingPolicy(CircularPolicy, kind="ring"):
    """Policy that keeps the newest `window + rollback_slots` tokens per row; position `p` is in slot `p % capacity`.

    With n tokens seen, slot s holds position `n - 1 - (n - 1 - s) % capacity`, negative meaning empty. No number
    of tokens and no prompt length is a special case, so one graph serves them all. An attention chunk is kept in a
    ring as well: the model's mask function decides which of its keys a query sees.

    Attributes:
        window: Tokens a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be removed past the window.

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
        """See `SlotPolicy.capacity`."""
        return self.window + self.rollback_slots

    @property
    def ring(self) -> int:
        """See `SlotPolicy.ring`."""
        return self.capacity

    @property
    def first_round(self) -> int:
        """See `SlotPolicy.first_round`."""
        return self.capacity

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""
        return torch.remainder(length, self.capacity)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # `newest - slot` may be as low as -capacity. One capacity is added, because
        # ExecuTorch's integer remainder has the dividend's sign, and torch's the divisor's.
        return newest - torch.remainder(newest - slot + self.capacity, self.capacity)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`."""
        if not self.wraps(kv_read_len):
            return None
        if not is_one(query_length):
            return self.positions_beside_new(length, query_length)
        after = length[:, None] + 1
        positions = self.positions(after)
        return torch.where(positions < 0, after, positions)

    def positions_beside_new(self, length: torch.Tensor, query_length: int) -> torch.Tensor:
        """Return the positions of the slots before a step, then of its new tokens, see `aligned_positions`.

        Returns:
            int64 [batch_size, capacity + query_length].
        """
        length = length[:, None]
        old = self.positions(length)
        new = length + torch.arange(query_length, device=length.device)
        hidden = length + query_length
        return aligned_positions(torch.cat([torch.where(old < 0, hidden, old), new], dim=1), hidden)
