"""Cache layers in the layout of ExecuTorch's own operators, whose cost follows the filled length, not the allocated one.

`llama::update_cache`, `llama::update_cache_with_indices` and `llama::custom_sdpa` (extension/llm/custom_ops of ExecuTorch 1.4)
take a cache as [batch, slots, heads, dim]. A program of one row gives them its heads for the batch, [num_heads, slots, 1, dim]:
what a head reads then lies together, instead of a slot's heads. One program serves steps of one token and of several: the form
of attention is chosen at run time, per layer, see `attention_forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  registers torch.ops.llama, here and in the runtime
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...cache.layers import FullLayer, KeyValueLayer, RingLayer, StateTensor
from ...common.compat.torch import check
from .attention_forms import fused_attention

#: The operator runs its heads in parallel: folding leaves at least this many, or all there are.
LEAST_PARALLEL_HEADS = 4

# Larger than any cache: what makes a step of several tokens miss a bound that a step of one is held to.
_SEVERAL = 1 << 40

# The layer that gave attention its keys, and what is read once per step of all layers, by the length it was read from.
_layer_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
_read_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def fused_layer(keys: torch.Tensor) -> FusedFullLayer | FusedRingLayer | None:
    """The fused layer whose `update` returned these keys, or None."""
    return _layer_of.get(keys)


class FusedFullLayer(FullLayer):
    """A `FullLayer` of one row. It exists in traced programs only, and attention must go through `attend`.

    Keys and values are [num_heads, capacity, 1, head_dim].
    """

    #: State tensors that hold a row per slot.
    parts: ClassVar[tuple[str, ...]] = ("keys", "values")

    state = {
        "keys": StateTensor("num_heads", "capacity", "batch_size", "head_dim"),
        "values": StateTensor("num_heads", "capacity", "batch_size", "value_head_dim"),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }

    @classmethod
    def like(cls, layer: FullLayer) -> FusedFullLayer:
        """An empty layer of the same sizes."""
        batch_size, num_heads, capacity, head_dim = layer.keys.shape
        return cls(batch_size, num_heads, head_dim, capacity, dtype=layer.states_dtype, device=layer.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens.

        Args:
            key_states: [1, num_heads, query_length, head_dim].
            value_states: [1, num_heads, query_length, head_dim].

        Returns:
            The buffers, keys and values [num_heads, capacity, 1, head_dim].
        """
        start = self._start(key_states.shape[2])
        for buffer, rows in zip(self._stored(), self._rows(key_states, value_states), strict=True):
            torch.ops.llama.update_cache(rows, buffer, start)
        return _handed_over(self, key_states.shape[2])

    def attend(self, query: torch.Tensor, attention_mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
        """Causal attention over what is filled.

        Args:
            query: [1, heads, query_length, head_dim].
            attention_mask: Not looked at.
            scaling: Factor on the scores.

        Returns:
            [1, query_length, heads, head_dim].
        """
        heads, query_length = query.shape[1], query.shape[2]
        fold = fold_of(heads, self.keys.shape[0])
        operands = [query, self.cumulative_length, *self._stored()]
        single = _newest_if_single(self._start(query_length), query_length)
        return fused_attention(operands, single, "full", fold, self.capacity, scaling)[0]

    def _stored(self) -> tuple[torch.Tensor, ...]:
        """The buffers of `parts`."""
        return tuple(getattr(self, name) for name in self.parts)

    def _rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What new keys and values [1, num_heads, query_length, head_dim] add to each of `parts`: [num_heads, query_length, 1, ...]."""
        return heads_as_batch(key_states), heads_as_batch(value_states)

    def _start(self, query_length: int) -> int:
        """The row's length as a symbolic integer, which is what the operators take."""
        start = _read_once(self.cumulative_length, "start", lambda: self.cumulative_length[0].item())
        check(start >= 0)
        check(start < self.capacity)
        check(start + query_length <= self.capacity)
        return start


class FusedRingLayer(RingLayer):
    """A `RingLayer` without slack, of one row, otherwise like `FusedFullLayer`.

    Keys and values are [num_heads, capacity + 1, 1, head_dim]: the last slot takes what is to be written nowhere, and is never
    read. One token is written before attention, which then runs over the filled slots without a mask: in a ring of exactly one
    window all of them are seen, and their order does not matter. Several attend over the ring as it was plus themselves, under
    the mask, and are written after that.
    """

    parts: ClassVar[tuple[str, ...]] = FusedFullLayer.parts

    state = {
        "keys": StateTensor("num_heads", "slots", "batch_size", "head_dim"),
        "values": StateTensor("num_heads", "slots", "batch_size", "value_head_dim"),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }

    @classmethod
    def like(cls, layer: RingLayer) -> FusedRingLayer:
        """An empty layer of the same sizes."""
        batch_size, num_heads, _, head_dim = layer.keys.shape
        return cls(batch_size, num_heads, head_dim, layer.window, dtype=layer.states_dtype, device=layer.device)

    def allocate(self, sizes: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate({**sizes, "slots": self.capacity + 1}, dtype, device)

    def slot_positions(self, query_length: int) -> torch.Tensor:
        # Of the ring before this step and the new tokens after it, for any number of them: `attend` joins the two.
        length = self.cumulative_length[:, None]
        old = self._positions(length)
        new = length + torch.arange(query_length, device=self.device)
        return torch.cat([torch.where(old < 0, length + query_length, old), new], dim=1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens; `attend` writes them.

        Args:
            key_states: [1, num_heads, query_length, head_dim].
            value_states: [1, num_heads, query_length, head_dim].

        Returns:
            The buffers, keys and values [num_heads, capacity + 1, 1, head_dim].
        """
        self._new = self._rows(key_states, value_states)
        return _handed_over(self, key_states.shape[2])

    _stored = FusedFullLayer._stored
    _rows = FusedFullLayer._rows

    def attend(self, query: torch.Tensor, attention_mask: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention over the window, then the ring as it is after the step.

        Args:
            query: [1, heads, query_length, head_dim].
            attention_mask: Additive, [1, 1, query_length, capacity + query_length], over the ring and the new tokens.
            scaling: Factor on the scores.

        Returns:
            [1, query_length, heads, head_dim].
        """
        heads, query_length = query.shape[1], query.shape[2]
        slot, reach, slots = self._places(query_length)
        for buffer, rows in zip(self._stored(), self._new, strict=True):
            torch.ops.llama.update_cache(rows[:, :1], buffer, slot)
        fold = fold_of(heads, self.keys.shape[0])
        operands = [query, attention_mask[0, 0], slots, self.cumulative_length, *self._stored(), *self._new]
        single = _newest_if_single(reach, query_length)
        # The slots are handed through: nothing else keeps the writes below from being scheduled before the reads above.
        output, slots = fused_attention(operands, single, "ring", fold, self.capacity, scaling)
        for buffer, rows in zip(self._stored(), self._new, strict=True):
            torch.ops.llama.update_cache_with_indices(rows, buffer, 0, slots)
        return output

    def _places(self, query_length: int) -> tuple[int, int, torch.Tensor]:
        """Where the tokens of this step go.

        Returns:
            The slot of a single token, or the spare one where there are several; the newest filled slot if the token is
            single; and the slot of each token, int64 [num_heads, query_length], the spare one for those already past the window.
        """

        def read() -> tuple[int, int, torch.Tensor]:
            length, spare = self.cumulative_length, self.capacity
            slot = torch.clamp(torch.remainder(length, spare) + (query_length - 1) * spare, max=spare)[0].item()
            reach = torch.clamp(length, max=spare - 1)[0].item()
            check(slot >= 0)
            check(slot <= spare)
            check(reach >= 0)
            offsets = torch.arange(query_length, device=self.device)
            slots = torch.where(offsets < query_length - spare, spare, torch.remainder(length + offsets, spare))
            return slot, reach, slots.repeat(self.keys.shape[0], 1)

        return _read_once(self.cumulative_length, (self.capacity, self.keys.shape[0]), read)


def heads_as_batch(states: torch.Tensor) -> torch.Tensor:
    """[1, num_heads, length, dim] -> [num_heads, length, 1, dim]."""
    return states.reshape(states.shape[1], states.shape[2], 1, states.shape[3])


def fold_of(heads: int, kv_heads: int) -> int:
    """How many query heads that share a key head become rows of one product: the most that leave enough heads in parallel."""
    groups = heads // kv_heads
    enough = min(LEAST_PARALLEL_HEADS, heads)
    return max(fold for fold in range(1, groups + 1) if groups % fold == 0 and heads // fold >= enough)


def _handed_over(layer: KeyValueLayer, query_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    _layer_of[layer.keys] = layer
    layer.advance(query_length)
    return layer.keys, layer.values


def _read_once(length: torch.Tensor, name: Any, read: Callable[[], Any]) -> Any:
    values = _read_of.setdefault(length, {})
    if name not in values:
        values[name] = read()
    return values[name]


def _newest_if_single(newest: int, query_length: int) -> int:
    """The newest slot to read of a step of one token, below zero for several: symbolic, as one number that is compared once."""
    return newest - _SEVERAL * (query_length - 1)
