"""Attention sinks: the first tokens and the newest ones, so that a full-attention layer runs on without end.

Keeping the first few tokens beside a sliding window is the method of StreamingLLM (Xiao et al., 2023, arXiv:2309.17453): models
put much of their attention there, and fall apart when a plain window drops them. That paper also counts positions anew within
the cache. Here every key keeps the position it was rotated with, its own in the text: a layer is handed keys after the rotary
embedding, whose form is the model's business, and positions stay what every other layer, and the model, takes them for.
"""

from __future__ import annotations

from typing import Any

import torch

from .circular import TurningLayer, check_count, is_one


class SinkLayer(TurningLayer):
    """Keeps the first `sinks` tokens of each row and a ring of the newest `window + slack` after them.

    A query at position q sees itself, the positions below `sinks`, and those from q - window + 1 on. Position p lives in slot p
    if p < sinks, else in slot `sinks + (p - sinks) % (window + slack)`; all of it follows from the length, as in `RingLayer`.

    Args:
        batch_size, num_heads, head_dim, value_head_dim, dtype, device: See `KeyValueLayer`.
        sinks: First tokens, always seen.
        window: Newest tokens that a query attends to, itself included.
        slack: Extra slots, so that up to `slack + 1` tokens can be taken back past the window.

    Raises:
        InputError: If `sinks` or `window` is not a positive int or `slack` a negative one.
    """

    config_names = ("capacity", "sinks", "window")

    def __init__(
        self, batch_size: int, num_heads: int, head_dim: int, sinks: int, window: int, *, slack: int = 0, **options: Any
    ) -> None:
        self.sinks = check_count(self, "sinks", sinks, 1)
        super().__init__(batch_size, num_heads, head_dim, window, slack=slack, sinks=sinks, **options)

    @property
    def ring(self) -> int:
        """Slots after the sinks."""
        return self.capacity - self.sinks

    @property
    def _next_slot(self) -> torch.Tensor:
        length = self.cumulative_length
        turned = self.sinks + torch.remainder(length - self.sinks + self.ring * self.sinks, self.ring)
        return torch.where(length < self.sinks, length, turned)

    @property
    def _has_no_turn(self) -> bool:
        return self.read_length is not None and self.read_length <= self.sinks + self.window

    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        """Absolute position of each key, for each query where there are several, since a window of its own belongs to each.

        Returns:
            int64 [batch_size, kv_length], or [batch_size, query_length, kv_length] for more than one new token. What a query
            does not see is given a position past every query. None where slot `s` holds position `s` in every row.
        """
        if self._has_no_turn:
            return None
        length = self.cumulative_length[:, None]
        query = length + torch.arange(query_length, device=self.device)
        if is_one(query_length):
            positions = self._positions(length + 1)
            return torch.where(self._seen(positions, query), positions, length + 1)
        positions = torch.cat([self._positions(length), query], dim=1)[:, None, :]
        return torch.where(self._seen(positions, query[:, :, None]), positions, (length + query_length)[:, :, None])

    def _seen(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        # Causality is the model's mask function's part.
        return (positions >= 0) & ((positions < self.sinks) | (positions > query - self.window))

    def _positions(self, length: torch.Tensor) -> torch.Tensor:
        slot = torch.arange(self.capacity, device=self.device)
        newest = length - 1
        # Of the ring, counted from the first token after the sinks. The dividend is kept from being negative for any length,
        # as ExecuTorch's integer remainder takes its sign from there.
        turned = newest - torch.remainder(newest - slot + self.ring * (self.sinks + 1), self.ring)
        ring = torch.where(turned >= self.sinks, turned, -1)
        return torch.where(slot < self.sinks, torch.where(slot < length, slot, -1), ring)

    def max_rollback(self, length: int, high_water: int) -> int:
        if high_water <= self.capacity:
            return length
        # As in a ring: the slots of positions from `sinks` to high_water - 1 - ring hold later tokens.
        return max(0, min(length, length - (high_water - 1 - self.ring + self.window)))
