"""Full attention over several processes: each keeps every `size`-th token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InputError
from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class SplitPolicy(SlotPolicy, kind="split"):
    """Of up to `tokens` tokens per row, those at the positions `rank`, `rank + size`, and so on: slot `s` holds
    position `s * size + rank`.

    So all ranks have as much to read, however many tokens there are. One more slot takes the tokens of other ranks,
    and counts as a position behind all: a step writes as many rows on each rank.

    Attributes:
        tokens: Most that a row can hold, on all ranks together.
        rank: This one, from 0.
        size: How many ranks there are.

    Raises:
        InputError: If a number is out of range.
    """

    tokens: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        check_count(self.tokens, "tokens of a split policy", 1)
        check_count(self.size, "size of a split policy", 2)
        if type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise InputError(f"rank of a split policy is {self.rank!r}; it must be from 0 to {self.size - 1}")

    @property
    def own(self) -> int:
        """Slots for tokens: the same number on every rank."""
        return -(-self.tokens // self.size)

    @property
    def capacity(self) -> int:
        return self.own + 1

    @property
    def max_length(self) -> int:
        return self.tokens

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        is_own = torch.remainder(positions, self.size) == self.rank
        return torch.where(is_own, torch.div(positions, self.size, rounding_mode="floor"), self.own)

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        return self.slots_of(length)

    def slots_read(self, kv_read_len: int | None) -> int:
        return self.own if kv_read_len is None else min(-(-kv_read_len // self.size), self.own)

    def reads_up_to(self, kv_read_len: int | None) -> bool:
        return False

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        slot = torch.arange(self.capacity, device=length.device)
        position = slot * self.size + self.rank
        return torch.where((position < length) & (slot < self.own), position, -1)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`; an empty slot's own position is past every query."""
        slot = torch.arange(self.slots_read(kv_read_len), device=length.device)
        return (slot * self.size + self.rank).expand(length.shape[0], -1)
