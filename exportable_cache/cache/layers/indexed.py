"""Sparse attention by an indexer (GLM MoE DSA, DeepSeek V3.2): full attention, and the keys that choose what it sees."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InputError
from .full import FullLayer
from .layer import StateTensor


class IndexedLayer(FullLayer):
    """A `FullLayer` with one more key per token, of the indexer: [batch_size, capacity, index_head_dim].

    Args:
        batch_size, num_heads, head_dim, capacity, options: See `FullLayer`.
        index_head_dim: Size of an indexer key.
        index_dtype: Of the indexer keys; the layer's dtype by default.

    Raises:
        InputError: If `index_head_dim` is not a positive int.
    """

    state = {
        **FullLayer.state,
        "indexer_keys": StateTensor("batch_size", "capacity", "index_head_dim"),
    }

    def __init__(
        self, batch_size: int, num_heads: int, head_dim: int, capacity: int, *, index_head_dim: int, **options: Any
    ) -> None:
        if not isinstance(index_head_dim, int) or isinstance(index_head_dim, bool) or index_head_dim < 1:
            raise InputError(
                f"index_head_dim of an indexed layer is {index_head_dim!r}; it must be an int of at least 1"
            )
        self._index_head_dim = index_head_dim
        super().__init__(batch_size, num_heads, head_dim, capacity, **options)

    def allocate(self, sizes: Any, dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate({**sizes, "index_head_dim": self._index_head_dim}, dtype, device)

    def _finish(self, high_water: int | None) -> None:
        super()._finish(high_water)
        self._awaiting: str | None = None
        self._uncounted = 0

    def get_seq_length(self) -> torch.Tensor:
        """Tokens seen, int64 0-D, with those that `update` was given in a program, whose length is an input (GLM 5 Next asks)."""
        return self.cumulative_length[0] + self._uncounted

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `FullLayer.update`."""
        result = super().update(key_states, value_states, *args, **kwargs)
        self._awaiting = None if self._awaiting == "update" else "indexer"
        self._uncounted = 0 if self.counts else key_states.shape[2]
        return result

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer keys of the same tokens, before or after `update`.

        Args:
            indexer_key_states: [batch_size, query_length, index_head_dim].

        Returns:
            All slots that are read [batch_size, slots, index_head_dim]; those past the newest token are for the mask to hide.
        """
        query_length = indexer_key_states.shape[1]
        start = self.cumulative_length if self.start is None else self.start
        if self.start is None and self._awaiting == "indexer":
            # In plain use `update` has counted these tokens already.
            start = start - query_length
        self._awaiting = None if self._awaiting == "indexer" else "update"
        slots = start[:, None] + torch.arange(query_length, device=self.device)
        new = indexer_key_states.to(self.indexer_keys.dtype)
        if self.in_place:
            _write_rows_(self.indexer_keys, slots, new)
        else:
            self.indexer_keys = _write_rows(self.indexer_keys, slots, new)
        return self.indexer_keys[:, : self.slots_read]


def _write_rows_(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [batch_size, query_length, dim] into [batch_size, capacity, dim] in place, as `key_value.write_slots_` does."""
    if buffer.shape[0] == 1:
        buffer.index_copy_(1, slots[0], rows)
    else:
        torch.ops.aten.index_put_.default(buffer, _row_index(buffer, slots), rows)


def _write_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if buffer.shape[0] == 1:
        return buffer.index_copy(1, slots[0], rows)
    return torch.ops.aten.index_put.default(buffer, _row_index(buffer, slots), rows)


def _row_index(buffer: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
    return [torch.arange(buffer.shape[0], device=buffer.device)[:, None], slots]
