"""Writing rows into slots of a static buffer and reading them, with and without gradients."""

from __future__ import annotations

import torch


def tracked(buffer: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
    """Return the buffer to write `new` into, in place, and to read back in the same step.

    If `new` requires a gradient, this is another tensor over the same memory, because the buffer itself would keep the
    graph of every step that wrote it.
    """
    return buffer.detach() if any(tensor.requires_grad for tensor in new) else buffer


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
    """Return a new tensor with the rows that `write_slots_` writes in place."""
    if buffer.shape[0] == 1:
        return buffer.index_copy(2, slots[0], rows)
    return torch.ops.aten.index_put.default(buffer, _row_index(buffer, slots), rows.transpose(1, 2))


def read_slots(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows at some slots, [batch_size, num_heads, n, dim].

    Args:
        buffer: [batch_size, num_heads, capacity, dim].
        slots: int64 [batch_size, n].
    """
    if buffer.shape[0] == 1:
        return buffer.index_select(2, slots[0])
    return torch.ops.aten.index.Tensor(buffer, _row_index(buffer, slots)).transpose(1, 2)


def _row_index(buffer: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor | None]:
    # Indices on dimensions 0 and 2 with a slice between them put the indexed dimensions first: [batch, query, heads,
    # dim].
    return [torch.arange(buffer.shape[0], device=buffer.device)[:, None], None, slots]


#: A graph for every length of a prompt pads keys to a multiple of this number, because attention kernels of GPUs take
#: masks whose rows are aligned. If torch pads a mask itself, the padding depends on the length, and so do the guards.
ALIGNMENT = 8
#: Devices whose attention takes masks of any width.
_ANY_WIDTH = frozenset({"cpu"})


def needs_alignment(tensor: torch.Tensor) -> bool:
    """Return True if attention on the device of a tensor needs masks of aligned widths."""
    return tensor.device.type not in _ANY_WIDTH


def aligned(keys: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeat the last entry along a dimension up to a multiple of 8 entries on a GPU; return other tensors unchanged.

    The size is a multiple by construction, also if it is symbolic, so that no guard asks for it.
    """
    if not needs_alignment(keys):
        return keys
    size = keys.shape[dim]
    width = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return keys.index_select(dim, torch.arange(width, device=keys.device).clamp(max=size - 1))


def aligned_positions(positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the positions of `aligned` keys, int64 [batch_size, width].

    Args:
        positions: Positions of the keys, int64 [batch_size, kv_length].
        hidden: Position that no query sees, int64 [batch_size, 1]. Padding gets it.
    """
    padded = aligned(positions, 1)
    if padded is positions:
        return positions
    return torch.where(torch.arange(padded.shape[1], device=padded.device) < positions.shape[1], padded, hidden)
