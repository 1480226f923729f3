"""Sliding-window attention: the newest tokens only, in a ring whose positions are arithmetic on the length."""

from __future__ import annotations

import torch

from .circular import TurningLayer, is_one


class RingLayer(TurningLayer):
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

    @property
    def _next_slot(self) -> torch.Tensor:
        return torch.remainder(self.cumulative_length, self.capacity)

    @property
    def _has_no_turn(self) -> bool:
        return self.read_length is not None and self.read_length <= self.capacity

    def slot_positions(self, query_length: int) -> torch.Tensor | None:
        if self._has_no_turn:
            return None
        length = self.cumulative_length[:, None]
        if is_one(query_length):
            positions = self._positions(length + 1)
            return torch.where(positions < 0, length + 1, positions)
        old = self._positions(length)
        new = length + torch.arange(query_length, device=self.device)
        return torch.cat([torch.where(old < 0, length + query_length, old), new], dim=1)

    def _positions(self, length: torch.Tensor) -> torch.Tensor:
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
