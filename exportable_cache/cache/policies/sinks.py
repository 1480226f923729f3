"""Attention sinks: the first tokens and the newest ones, so that a full-attention layer runs on without end.

Keeping the first few tokens beside a sliding window is the method of StreamingLLM (Xiao et al., 2023,
arXiv:2309.17453): models put much of their attention there, and fall apart when a plain window drops them. That paper
also counts positions anew within the cache. Here every key keeps the position it was rotated with, its own in the text:
a layer is handed keys after the rotary embedding, whose form is the model's business, and positions stay what every
other layer, and the model, takes them for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..component import check_count
from .ring import CircularPolicy, is_one


@dataclass(frozen=True)
class SinkPolicy(CircularPolicy, kind="sinks"):
    """Keeps the first `sinks` tokens of each row and a ring of the newest `window + rollback_slots` after them.

    A query at position q sees itself, the positions below `sinks`, and those from q - window + 1 on. Position p lives
    in slot p if p < sinks, else in slot `sinks + (p - sinks) % ring`; all of it follows from the length, as in
    `RingPolicy`.

    Attributes:
        sinks: First tokens, always seen.
        window: Newest tokens that a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be taken back past the window.

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
        return self.sinks + self.ring

    @property
    def ring(self) -> int:
        return self.window + self.rollback_slots

    @property
    def first_round(self) -> int:
        # Extra slots keep tokens longer than a query sees them.
        return self.sinks + self.window

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        wrapped = self.sinks + torch.remainder(length - self.sinks + self.ring * self.sinks, self.ring)
        return torch.where(length < self.sinks, length, wrapped)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # Of the ring, counted from the first token after the sinks. The dividend is kept from being negative for any
        # length, # as ExecuTorch's integer remainder takes its sign from there.
        wrapped = newest - torch.remainder(newest - slot + self.ring * (self.sinks + 1), self.ring)
        ring = torch.where(wrapped >= self.sinks, wrapped, -1)
        return torch.where(slot < self.sinks, torch.where(slot < length, slot, -1), ring)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`: of several new tokens each has a window of its own, and what it does not see
        is given a position past every query.
        """
        if not self.wraps(kv_read_len):
            return None
        length = length[:, None]
        query = length + torch.arange(query_length, device=length.device)
        if is_one(query_length):
            positions = self.positions(length + 1)
            return torch.where(self._seen(positions, query), positions, length + 1)
        positions = torch.cat([self.positions(length), query], dim=1)[:, None, :]
        return torch.where(self._seen(positions, query[:, :, None]), positions, (length + query_length)[:, :, None])

    def _seen(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        # Causality is the model's mask function's part.
        return (positions >= 0) & ((positions < self.sinks) | (positions > query - self.window))
