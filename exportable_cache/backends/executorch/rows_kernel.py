"""Several rows over plain operators, on runtimes that lack this package's kernels.

ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows, and rows are at positions of their own. So all
slots of all rows and heads lie in one dimension, in which every new token has a number of its own. What attention reads
is a view of it. (The buffer itself may not be the view: a method then writes what the next one does not see.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...cache.kernel import Kernel
from ...cache.layers import CacheLayer
from ...cache.policies import FullPolicy, RingPolicy
from ...cache.policies.circular import is_one
from ...cache.storage import FloatStorage

if TYPE_CHECKING:
    from ...cache.layers.composed import ComposedLayer

#: Keys and values.
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowsKernel(Kernel, kind="executorch_rows"):
    """Plain operators on keys and values [batch_size * num_heads * capacity, dim], which are stored as they are.

    Attributes:
        heads: Of keys and values.
        capacity: Slots of a row.
    """

    heads: int
    capacity: int

    row_dims = ("rows_heads_and_slots",)

    @classmethod
    def over(cls, layer: ComposedLayer) -> ComposedLayer:
        """An empty layer of the same policy, storage and sizes, in this layout; one without keys as it is.

        Args:
            layer: One that `takes_rows`.
        """
        if layer.storage is None:
            return layer
        tensors = dict(layer.named_state())
        _, heads, capacity, _ = tensors["keys"].shape
        for name in ("keys", "values"):
            tensors[name] = tensors[name].new_zeros(tensors[name].shape[:3].numel(), tensors[name].shape[3])
        return layer.with_kernel(cls(heads, capacity), tensors)

    def update(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PortableKernel.update`: the same slots, written and read in the same order."""
        policy, query_length = layer.policy, key_states.shape[2]
        length, new = layer.cumulative_length, (key_states, value_states)
        if not policy.wraps(layer.context.kv_read_len):
            slots = policy.slots_of(length[:, None] + torch.arange(query_length, device=layer.device))
            written = self._write(layer, slots, new)
            layer.advance(query_length)
            return self._read(layer, written, layer.slots_read)
        if is_one(query_length):
            written = self._write(layer, policy.next_slot(length)[:, None], new)
            layer.advance(1)
            return self._read(layer, written, self.capacity)
        seen = self._gather(layer, length[:, None], new)
        layer.advance(query_length)
        return seen

    def _write(self, layer: CacheLayer, slots: torch.Tensor, new: _Pair) -> _Pair:
        """Put new rows, each [batch_size, num_heads, query_length, dim], into `slots` int64 [batch_size,
        query_length].
        """
        index = self._numbers(slots, self.capacity)
        for held, rows in zip(_held(layer), new, strict=True):
            held.index_copy_(0, index, rows.reshape(-1, rows.shape[3]))
        return _held(layer)

    def _numbers(self, slots: torch.Tensor, capacity: int) -> torch.Tensor:
        """Of slots [batch_size, n] among those of all rows and heads: int64 [batch_size * heads * n]."""
        first = torch.arange(slots.shape[0] * self.heads, device=slots.device) * capacity
        return (first.view(slots.shape[0], self.heads, 1) + slots[:, None]).reshape(-1)

    def _read(self, layer: CacheLayer, written: _Pair, slots: int) -> _Pair:
        """Keys and values of the first slots, [batch_size, num_heads, slots, dim]."""
        keys, values = (held.view(-1, self.heads, self.capacity, held.shape[1]) for held in written)
        # ExecuTorch copies even a slice of everything; a dynamic number must not be compared.
        if layer.reads_so_far or slots < self.capacity:
            keys, values = keys[:, :, :slots], values[:, :, :slots]
        return keys, values

    def _gather(self, layer: CacheLayer, length: torch.Tensor, new: _Pair) -> _Pair:
        """See `PortableKernel._gather`; `length` [batch_size, 1] is that before the step."""
        capacity, query_length = self.capacity, new[0].shape[2]
        positions = layer.policy.positions(length + query_length)
        slot = torch.arange(capacity, device=layer.device)
        index = self._numbers(
            torch.where(positions >= length, capacity + positions - length, slot), capacity + query_length
        )
        keys, values = (
            torch.cat([held.view(-1, self.heads, capacity, rows.shape[3]), rows], dim=2)
            for held, rows in zip(_held(layer), new, strict=True)
        )
        for held, joined in zip(_held(layer), (keys, values), strict=True):
            held.copy_(joined.reshape(-1, joined.shape[3]).index_select(0, index))
        return keys, values


def _held(layer: CacheLayer) -> _Pair:
    keys, values = (tensor for name, tensor in layer.named_state() if name in ("keys", "values"))
    return keys, values


def takes_rows(layer: ComposedLayer) -> bool:
    """Whether `RowsKernel` keeps what this layer does: keys and values of tokens, all or those of a ring, unrounded;
    or a state of fixed size in their place.
    """
    if layer.storage is None:
        return True
    is_known = isinstance(layer.policy, (FullPolicy, RingPolicy)) and isinstance(layer.storage, FloatStorage)
    return type(layer) is CacheLayer and is_known
