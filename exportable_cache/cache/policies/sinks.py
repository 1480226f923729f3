"""Policy of attention sinks: the first tokens and the newest ones, for full-attention layers without a limit.

StreamingLLM (Xiao et al., 2023, arXiv:2309.17453) keeps the first few tokens in addition to a sliding window, because
models put much of their attention there and degrade when a plain window drops them. That paper also renumbers positions
within the cache. Here every key keeps its position in the text, because a layer gets keys after the rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..component import check_count
from ..storage.slots import aligned_positions
from .ring import CircularPolicy, is_one


@dataclass(frozen=True)
class SinkPolicy(CircularPolicy, kind="sinks"):
    """Policy that keeps the first `sinks` tokens of each row, and a ring of the newest `window + rollback_slots`.

    A query at position q sees itself, the positions below `sinks`, and those from q - window + 1 on. Position p is
    in slot p if p < sinks, else in slot `sinks + (p - sinks) % ring`; all of it follows from the length, as in
    `RingPolicy`.

    Attributes:
        sinks: Number of first tokens, always visible.
        window: Newest tokens that a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be removed past the window.

    Raises:
        InputError: If `sinks` or `window` is not a positive int or `rollback_slots` a negative one.
    """

    sinks: int
    window: int
    rollback_slots: int = 0

    def __post_init__(self) -> None:
        check_count(self.sinks, "sinks of a sink policy", 1)
        check_count(self.window, "window of a sink policy", 1)
        check_count(self.rollback_slots, "rollback_slots of a sink policy", 0)

    @property
    def capacity(self) -> int:
        """See `SlotPolicy.capacity`."""
        return self.sinks + self.ring

    @property
    def ring(self) -> int:
        """See `SlotPolicy.ring`."""
        return self.window + self.rollback_slots

    @property
    def first_round(self) -> int:
        """See `SlotPolicy.first_round`."""
        # Without the extra slots, because they keep tokens that queries no longer see.
        return self.sinks + self.window

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""
        wrapped = self.sinks + torch.remainder(length - self.sinks + self.ring * self.sinks, self.ring)
        return torch.where(length < self.sinks, length, wrapped)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # Counted from the first token after the sinks. The dividend is never negative, because ExecuTorch's integer
        # remainder has its sign.
        wrapped = newest - torch.remainder(newest - slot + self.ring * (self.sinks + 1), self.ring)
        ring = torch.where(wrapped >= self.sinks, wrapped, -1)
        return torch.where(slot < self.sinks, torch.where(slot < length, slot, -1), ring)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`; each of several new tokens has its own window.

        Keys outside a token's window have a position past every query.
        """
        if not self.wraps(kv_read_len):
            return None
        length = length[:, None]
        query = length + torch.arange(query_length, device=length.device)
        if is_one(query_length):
            positions = self.positions(length + 1)
            return torch.where(self._seen(positions, query), positions, length + 1)
        hidden = length + query_length
        positions = aligned_positions(torch.cat([self.positions(length), query], dim=1), hidden)[:, None, :]
        return torch.where(self._seen(positions, query[:, :, None]), positions, hidden[:, :, None])

    def _seen(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        # The model's mask function applies causality.
        return (positions >= 0) & ((positions < self.sinks) | (positions > query - self.window))
