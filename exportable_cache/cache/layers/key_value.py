"""What layers that keep keys and values per token share: their declaration, and the two tensor moves."""

from __future__ import annotations

import torch

from ...errors import InputError
from .layer import CacheLayer, StateTensor


class KeyValueLayer(CacheLayer):
    """Keys [batch_size, num_heads, capacity, head_dim] and values [batch_size, num_heads, capacity, value_head_dim].

    Args:
        batch_size: Rows.
        num_heads: Key and value heads.
        head_dim: Size of a key head.
        capacity: Slots.
        value_head_dim: Size of a value head, `head_dim` by default (they differ in MLA models).
        dtype: Of keys and values.
        device: Where to allocate.

    Raises:
        InputError: If a size is not a positive int or the dtype is not a floating one.
    """

    state = {
        "keys": StateTensor("batch_size", "num_heads", "capacity", "head_dim"),
        "values": StateTensor("batch_size", "num_heads", "capacity", "value_head_dim"),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }
    config_names = ("capacity",)

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        capacity: int,
        *,
        value_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {
            "batch_size": batch_size,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "capacity": capacity,
            "value_head_dim": head_dim if value_head_dim is None else value_head_dim,
        }
        for name, size in sizes.items():
            # Latent keys may be all there is of a token (GLM 5 Next): values of size 0.
            least = 0 if name == "value_head_dim" else 1
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise InputError(f"{name} of a cache layer is {size!r}; it must be an int of at least {least}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(f"dtype of a cache layer is {dtype!r}; it must be a floating dtype such as torch.float32")
        self.capacity = capacity
        self.allocate(sizes, dtype, device)

    @property
    def states_dtype(self) -> torch.dtype:
        """Of the keys and values that `update` takes and gives."""
        return self.keys.dtype

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's new tokens at its own length, the slot being the position, and return the slots to read."""
        query_length = key_states.shape[2]
        slots = self.cumulative_length[:, None] + torch.arange(query_length, device=self.device)
        self._write(slots, key_states, value_states)
        self.advance(query_length)
        if self.slots_read == self.capacity:
            return self.keys, self.values
        return self.keys[:, :, : self.slots_read], self.values[:, :, : self.slots_read]

    def _write(self, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put new keys and values [batch_size, num_heads, query_length, dim] into `slots` [batch_size, query_length]."""
        if self.in_place:
            # Not assigned: rebinding the attribute to an alias of itself would make it an output of compiled graphs.
            write_slots_(self.keys, slots, key_states)
            write_slots_(self.values, slots, value_states)
        else:
            self.keys = write_slots(self.keys, slots, key_states)
            self.values = write_slots(self.values, slots, value_states)


def write_slots_(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write one row per slot, in place.

    Batch size 1 goes through `index_copy_`, which ExecuTorch reinplaces and which takes a 1-D index: assigning
    `buffer[:, :, slots]` strips leading ones there and fails at run time.

    Args:
        buffer: [batch_size, num_heads, capacity, dim].
        slots: int64 [batch_size, query_length], distinct within a row.
        rows: [batch_size, num_heads, query_length, dim].
    """
    if buffer.shape[0] == 1:
        buffer.index_copy_(2, slots[0], rows)
    else:
        torch.ops.aten.index_put_.default(buffer, _row_index(buffer, slots), rows.transpose(1, 2))


def write_slots(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Like `write_slots_`, returning a new tensor."""
    if buffer.shape[0] == 1:
        return buffer.index_copy(2, slots[0], rows)
    return torch.ops.aten.index_put.default(buffer, _row_index(buffer, slots), rows.transpose(1, 2))


def read_slots(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather rows: [batch_size, num_heads, capacity, dim] at `slots` [batch_size, n] -> [batch_size, num_heads, n, dim]."""
    if buffer.shape[0] == 1:
        return buffer.index_select(2, slots[0])
    return torch.ops.aten.index.Tensor(buffer, _row_index(buffer, slots)).transpose(1, 2)


def _row_index(buffer: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor | None]:
    # Indices on dimensions 0 and 2 with a slice between them put the indexed dimensions first: [batch, query, heads, dim].
    return [torch.arange(buffer.shape[0], device=buffer.device)[:, None], None, slots]
