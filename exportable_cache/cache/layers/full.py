"""Full attention: every token is kept, slot `s` holds position `s`."""

from __future__ import annotations

from typing import Any

import torch

from .checks import check_new_states, check_room, is_traced
from .key_value import KeyValueLayer


class FullLayer(KeyValueLayer):
    """Keeps up to `capacity` tokens per row; the slot is the position. See `KeyValueLayer` for the arguments."""

    @property
    def max_length(self) -> int:
        return self.capacity

    def slot_positions(self, query_length: int) -> None:
        # Slots past the newest token count as later positions, which causal masks exclude.
        return None

    def max_rollback(self, length: int, high_water: int) -> int:
        return length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens of each row at its own length.

        Args:
            key_states: [batch_size, num_heads, query_length, head_dim].
            value_states: [batch_size, num_heads, query_length, value_head_dim].

        Returns:
            The slots to read, all by default: keys [batch_size, num_heads, slots_read, head_dim], values
            [..., value_head_dim].

        Raises:
            CacheFullError: If they do not fit; nothing was written.
            InputError: If shape, dtype or device differ from the layer's.
        """
        if not is_traced(self.cumulative_length):
            check_new_states(self, key_states, value_states)
            # Elsewhere reading a length waits for the device, and the cache has already looked once for all layers.
            if self.device.type == "cpu":
                check_room(self.cumulative_length, key_states.shape[2], self.capacity)
        return self._append(key_states, value_states)
