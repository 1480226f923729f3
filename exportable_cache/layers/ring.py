"""Sliding-window attention: the newest tokens only, in a ring whose positions are arithmetic on the length."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError
from .guards import check_new_states, is_traced
from .key_value import KeyValueLayer


class RingLayer(KeyValueLayer):
    """Keeps the newest `window + slack` tokens per row; position `p` lives in slot `p % capacity`.

    With n tokens seen, slot s holds position `n - 1 - (n - 1 - s) % capacity`, negative meaning empty. Neither any
    number of tokens nor any prompt length is a special case, so one graph serves them all.

    Args:
        batch_size, num_heads, head_dim, value_head_dim, dtype, device: See `KeyValueLayer`.
        window: Tokens a query attends to, itself included.
        slack: Extra slots, so that up to `slack + 1` tokens can be taken back past the window.

    Raises:
        InputError: If `window` is not a positive int or `slack` a negative one.
    """

    is_sliding = True
    config_names = ("capacity", "window")

    def __init__(self, batch_size: int, num_heads: int, head_dim: int, window: int, *, slack: int = 0, **options: Any) -> None:
        for name, value, least in (("window", window, 1), ("slack", slack, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} of a ring layer is {value!r}; it must be an int of at least {least}")
        self.window = window
        super().__init__(batch_size, num_heads, head_dim, window + slack, **options)

    @property
    def max_length(self) -> None:
        return None

    @property
    def _next_slot(self) -> torch.Tensor:
        """Slot of the next token, int64 [batch_size]."""
        return torch.remainder(self.cumulative_length, self.capacity)

    @property
    def _has_no_turn(self) -> bool:
        """Whether the ring is known not to have begun its second turn: it is a full layer until then."""
        return self.read_length is not None and self.read_length <= self.capacity

    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        if self._has_no_turn:
            return None
        length = self.cumulative_length[:, None]
        if is_one(query_length):
            positions = self._ring_positions(length + 1)
            return torch.where(positions < 0, length + 1, positions)
        old = self._ring_positions(length)
        new = length + torch.arange(query_length, device=self.device)
        return torch.cat([torch.where(old < 0, length + query_length, old), new], dim=1)

    def _ring_positions(self, length: torch.Tensor) -> torch.Tensor:
        """Position each slot holds once `length` [batch_size, 1] tokens were written, int64 [batch_size, capacity]."""
        slot = torch.arange(self.capacity, device=self.device)
        newest = length - 1
        # `newest - slot` may be as low as -capacity. One capacity is added so that the dividend is never negative:
        # ExecuTorch's integer remainder takes the dividend's sign, torch's the divisor's.
        return newest - torch.remainder(newest - slot + self.capacity, self.capacity)

    def max_rollback(self, length: int, high_water: int) -> int:
        if high_water <= self.capacity:
            return length
        # Slots of positions up to high_water - 1 - capacity hold later tokens; the next query needs position - window + 1 on.
        return max(0, min(length, length - (high_water - 1 - self.capacity + self.window)))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens over the oldest.

        One token is written in place and attention runs over the ring. Several attend over the ring as it was plus
        themselves, after which the newest `capacity` of those rows become the ring: one gather per tensor.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            Keys and values [batch_size, num_heads, kv_length, dim], kv_length being capacity for one new token and
            capacity + query_length for more; `slots_read` for any number where `read_length` is within the ring.

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
        return self._turn(key_states, value_states, self._ring_positions(self.cumulative_length[:, None] + query_length))


def is_one(query_length: int) -> bool:
    """Whether one new token is all there can be: a decode step, static at that."""
    # A length that torch.export keeps symbolic may be one as well: it takes the general path, which is exact for any.
    return isinstance(query_length, int) and query_length == 1
