"""Several rows over plain operators, on runtimes that lack this package's kernels.

ExecuTorch 1.4.1 writes in place at one 1-D index, the same for all rows, and rows are at positions of their own. So all
slots of all rows and heads lie in one dimension, in which every new token has a number of its own. What attention reads
is a view of it. (The buffer itself may not be the view: a method then writes what the next one does not see.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ....cache.layers import CacheLayer
from ....cache.layout import PortableLayout
from ....cache.policies import FullPolicy, RingPolicy
from ....cache.storage import FloatStorage

if TYPE_CHECKING:
    from ....cache.layers import CacheLayer

#: Keys and values.
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowsLayout(PortableLayout, kind="executorch_rows"):
    """The portable kernel on keys and values [batch_size * num_heads * capacity, dim], which are stored as they are.

    Attributes:
        heads: Of keys and values.
    """

    heads: int

    row_dims = ("rows_heads_and_slots",)

    @classmethod
    def over(cls, layer: CacheLayer) -> CacheLayer:
        """An empty layer of the same policy, storage and sizes, in this layout; one without keys as it is.

        Args:
            layer: One that `takes_rows`.
        """
        if layer.storage is None:
            return layer
        tensors = dict(layer.named_state())
        heads = tensors["keys"].shape[1]
        for name in ("keys", "values"):
            tensors[name] = tensors[name].new_zeros(tensors[name].shape[:3].numel(), tensors[name].shape[3])
        return layer.with_layout(cls(heads), tensors)

    def _write(
        self, layer: CacheLayer, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> list[torch.Tensor]:
        index = self._numbers(slots, _capacity(layer))
        for held, rows in zip(_held(layer), (key_states, value_states), strict=True):
            held.index_copy_(0, index, rows.reshape(-1, rows.shape[3]))
        return self._by_row(layer)

    def _gather(self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> _Pair:
        capacity, query_length = _capacity(layer), key_states.shape[2]
        length = layer.cumulative_length[:, None]
        positions = layer.policy.positions(length + query_length)
        slot = torch.arange(capacity, device=layer.device)
        index = self._numbers(
            torch.where(positions >= length, capacity + positions - length, slot), capacity + query_length
        )
        keys, values = (
            torch.cat([held, rows], dim=2)
            for held, rows in zip(self._by_row(layer), (key_states, value_states), strict=True)
        )
        for held, joined in zip(_held(layer), (keys, values), strict=True):
            held.copy_(joined.reshape(-1, joined.shape[3]).index_select(0, index))
        layer.advance(query_length)
        return keys, values

    def _numbers(self, slots: torch.Tensor, capacity: int) -> torch.Tensor:
        """Of slots [batch_size, n] among those of all rows and heads: int64 [batch_size * heads * n]."""
        first = torch.arange(slots.shape[0] * self.heads, device=slots.device) * capacity
        return (first.view(slots.shape[0], self.heads, 1) + slots[:, None]).reshape(-1)

    def _by_row(self, layer: CacheLayer) -> list[torch.Tensor]:
        """What is held, each [batch_size, num_heads, capacity, dim]."""
        return [held.view(-1, self.heads, _capacity(layer), held.shape[1]) for held in _held(layer)]


def _capacity(layer: CacheLayer) -> int:
    capacity = layer.policy.capacity
    # Of the policies that `takes_rows` knows.
    assert capacity is not None
    return capacity


def _held(layer: CacheLayer) -> _Pair:
    keys, values = (tensor for name, tensor in layer.named_state() if name in ("keys", "values"))
    return keys, values


def takes_rows(layer: CacheLayer) -> bool:
    """Whether `RowsLayout` keeps what this layer does: keys and values of tokens, all or those of a ring, unrounded;
    or a state of fixed size in their place.
    """
    if layer.storage is None:
        return True
    is_known = isinstance(layer.policy, (FullPolicy, RingPolicy)) and isinstance(layer.storage, FloatStorage)
    return type(layer) is CacheLayer and is_known
