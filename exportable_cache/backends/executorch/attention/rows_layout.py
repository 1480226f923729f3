"""Several rows over plain operators, for runtimes without native kernels.

ExecuTorch 1.4.1 writes in place at a 1-D index that is the same for all rows, but each row is at its own position. So
the slots of all rows and heads are one dimension, in which every new token has its own index, and attention reads a
view. The buffer must not be the view, because one method would then not see what another wrote.
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
    from ....cache.layout import WrittenLayer

#: Keys and values.
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowsLayout(PortableLayout, kind="executorch_rows"):
    """Portable layout over keys and values [batch_size * num_heads * capacity, dim], stored unchanged.

    Attributes:
        heads: Number of key and value heads.
    """

    heads: int

    row_dims = ("rows_heads_and_slots",)

    @classmethod
    def over(cls, layer: CacheLayer) -> CacheLayer:
        """Return an empty layer of the same policy, storage and sizes in this layout.

        A layer without keys is returned unchanged.

        Args:
            layer: A layer for which `takes_rows` is True.
        """
        if layer.storage is None:
            return layer
        tensors = dict(layer.named_state())
        heads = tensors["keys"].shape[1]
        for name in ("keys", "values"):
            tensors[name] = tensors[name].new_zeros(tensors[name].shape[:3].numel(), tensors[name].shape[3])
        return layer.with_layout(cls(heads), tensors)

    def _write(
        self, layer: WrittenLayer, slots: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> list[torch.Tensor]:
        index = self._numbers(slots, _capacity(layer))
        for held, rows in zip(_held(layer), (key_states, value_states), strict=True):
            held.index_copy_(0, index, rows.reshape(-1, rows.shape[3]))
        return self._by_row(layer)

    def _gather(self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> _Pair:
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
        """Return indices int64 [batch_size * heads * n] of slots [batch_size, n] among those of all rows and heads."""
        first = torch.arange(slots.shape[0] * self.heads, device=slots.device) * capacity
        return (first.view(slots.shape[0], self.heads, 1) + slots[:, None]).reshape(-1)

    def _by_row(self, layer: WrittenLayer) -> list[torch.Tensor]:
        """Return keys and values, each [batch_size, num_heads, capacity, dim]."""
        return [held.view(-1, self.heads, _capacity(layer), held.shape[1]) for held in _held(layer)]


def _capacity(layer: WrittenLayer) -> int:
    capacity = layer.policy.capacity
    assert capacity is not None
    return capacity


def _held(layer: WrittenLayer) -> _Pair:
    keys, values = (tensor for name, tensor in layer.named_state() if name in ("keys", "values"))
    return keys, values


def takes_rows(layer: CacheLayer) -> bool:
    """Return True if `RowsLayout` supports the layer.

    Such a layer keeps unquantized keys and values of all tokens or of a ring, or a state of fixed size instead.
    """
    if layer.storage is None:
        return True
    is_known = isinstance(layer.policy, (FullPolicy, RingPolicy)) and isinstance(layer.storage, FloatStorage)
    return type(layer) is CacheLayer and is_known
