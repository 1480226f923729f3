"""What layers that write their slots again and again share: rings, and rings behind attention sinks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ...errors import InputError
from .checks import check_new_states, is_traced
from .key_value import KeyValueLayer, read_slots


class TurningLayer(KeyValueLayer):
    """Keeps the newest tokens in slots that are written anew at every turn; a layer without an end.

    Args:
        batch_size, num_heads, head_dim, value_head_dim, dtype, device: See `KeyValueLayer`.
        window: Tokens a query attends to, itself included.
        slack: Extra slots, so that up to `slack + 1` tokens can be taken back past the window.
        sinks: Slots before the ring that keep the first tokens.

    Raises:
        InputError: If `window` is not a positive int or `slack` a negative one.
    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        window: int,
        *,
        slack: int = 0,
        sinks: int = 0,
        **options: Any,
    ) -> None:
        self.window = check_count(self, "window", window, 1)
        super().__init__(
            batch_size, num_heads, head_dim, sinks + window + check_count(self, "slack", slack, 0), **options
        )

    @property
    def max_length(self) -> None:
        return None

    @property
    @abstractmethod
    def _has_no_turn(self) -> bool:
        """Whether no slot is known to have been written twice yet: it is a full layer until then."""

    @abstractmethod
    def _positions(self, length: torch.Tensor) -> torch.Tensor:
        """Position each slot holds once `length` [batch_size, 1] tokens were written, negative for none: int64 [batch_size, capacity]."""

    @property
    @abstractmethod
    def _next_slot(self) -> torch.Tensor:
        """Slot of the next token, int64 [batch_size]."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens over the oldest.

        One token is written in place and attention runs over the slots. Several attend over the slots as they were plus
        themselves, after which the slots take up what is to be kept of those rows: one gather per tensor.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            Keys and values [batch_size, num_heads, kv_length, dim], kv_length being capacity for one new token and
            capacity + query_length for more; `slots_read` for any number where `read_length` ends before the first turn.

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

    def _turn(
        self, key_states: torch.Tensor, value_states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrite the slots whose positions are new, and return all slots as they were, the new tokens behind them.

        Args:
            key_states, value_states: As `update` gets them.
            positions: Position that each slot holds after the write, int64 [batch_size, capacity].
        """
        length = self.cumulative_length[:, None]
        all_keys = torch.cat([self.keys, key_states], dim=2)
        all_values = torch.cat([self.values, value_states], dim=2)
        slot = torch.arange(self.capacity, device=self.device)
        source = torch.where(positions >= length, self.capacity + positions - length, slot)
        keys, values = read_slots(all_keys, source), read_slots(all_values, source)
        if self.in_place:
            self.keys.copy_(keys)
            self.values.copy_(values)
        else:
            self.keys, self.values = keys, values
        self.advance(key_states.shape[2])
        return all_keys, all_values


def check_count(layer: object, name: str, value: Any, least: int) -> int:
    """The value, or an InputError if it is not an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} of a {type(layer).__name__} is {value!r}; it must be an int of at least {least}")
    return value


def is_one(query_length: int) -> bool:
    """Whether one new token is all there can be: a decode step, static at that."""
    # A length that torch.export keeps symbolic may be one as well: it takes the general path, which is exact for any.
    return isinstance(query_length, int) and query_length == 1
