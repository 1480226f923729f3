"""Attention sinks: the first tokens and the newest ones, so that a full-attention layer runs on without end.

Keeping the first few tokens beside a sliding window is the method of StreamingLLM (Xiao et al., 2023, arXiv:2309.17453): models
put much of their attention there, and fall apart when a plain window drops them. That paper also counts positions anew within
the cache. Here every key keeps the position it was rotated with, its own in the text: a layer is handed keys after the rotary
embedding, whose form is the model's business, and positions stay what every other layer, and the model, takes them for.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError
from .guards import check_new_states, is_traced
from .key_value import KeyValueLayer
from .ring import is_one


class SinkLayer(KeyValueLayer):
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
        for name, value, least in (("sinks", sinks, 1), ("window", window, 1), ("slack", slack, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} of a sink layer is {value!r}; it must be an int of at least {least}")
        self.sinks = sinks
        self.window = window
        super().__init__(batch_size, num_heads, head_dim, sinks + window + slack, **options)

    @property
    def max_length(self) -> None:
        return None

    @property
    def ring(self) -> int:
        """Slots after the sinks."""
        return self.capacity - self.sinks

    @property
    def _next_slot(self) -> torch.Tensor:
        """Slot of the next token, int64 [batch_size]."""
        length = self.cumulative_length
        turned = self.sinks + torch.remainder(length - self.sinks + self.ring * self.sinks, self.ring)
        return torch.where(length < self.sinks, length, turned)

    @property
    def _has_no_turn(self) -> bool:
        """Whether nothing is known to have left the window yet: it is a full layer until then."""
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
        """Position each slot holds once `length` [batch_size, 1] tokens were written, -1 for none: int64 [batch_size, capacity]."""
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens: the first to the sinks, later ones over the oldest of the ring. See `RingLayer.update`.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            Keys and values [batch_size, num_heads, kv_length, dim], kv_length being capacity for one new token and
            capacity + query_length for more; `slots_read` for any number where `read_length` is within sinks and window.

        Raises:
            InputError: If shape, dtype or device differ from the layer's.
        """
        query_length = key_states.shape[2]
        if not is_traced(self.cumulative_length):
            check_new_states(self, key_states, value_states)
        if self._has_no_turn:
            return self._append(key_states, value_states)
        if is_one(query_length):
            self._write(self._next_slot[:, None], key_states, value_states)
            self.advance(1)
            return self.keys, self.values
        return self._turn(key_states, value_states, self._positions(self.cumulative_length[:, None] + query_length))
