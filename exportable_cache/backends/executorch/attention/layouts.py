"""Layouts over ExecuTorch's and native fused operators, and of several rows over plain operators.

The cost of the fused operators follows the filled length, not the capacity.
`llama::update_cache`, `llama::update_cache_with_indices` and `llama::custom_sdpa` (extension/llm/custom_ops of
ExecuTorch 1.4) take a cache as [batch, slots, heads, dim]. A program of one row passes its heads as the batch,
[num_heads, slots, 1, dim], so that the data of a head is contiguous. One program serves steps of one token and of
several; the form of attention is chosen at run time, per layer (`attention.forms`).

An 8-bit cache is written by the same operators. `llama::custom_quantized_sdpa` also quantizes the queries, and is 2.5
times slower than the float32 operator on a full cache. So one kernel dequantizes the filled slots into memory that all
layers share, and the float32 operator attends to them.

Runtimes without native kernels run several rows over plain operators. ExecuTorch 1.4.1 writes in place at a 1-D index
that is the same for all rows, but each row is at its own position. So the slots of all rows and heads are one
dimension, in which every new token has its own index, and attention reads a view. The buffer must not be the view,
because one method would then not see what another wrote.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....cache.attention.latents import expanded_output, latent_queries
from ....cache.layers import CacheLayer, RowSizes
from ....cache.layout import Layout, PortableLayout, StateTensor
from ....cache.policies import FullPolicy, RingPolicy, SinkPolicy
from ....cache.storage import FloatStorage, RoundedStorage
from .forms import fused_attention

if TYPE_CHECKING:
    from ....cache.layout import WrittenLayer
    from ....cache.policies import SlotPolicy

#: The operator runs heads in parallel, so folding leaves at least this many, or all.
LEAST_PARALLEL_HEADS = 4

# Larger than any cache, so that a step of several tokens fails the comparison for one token.
_BEYOND_ANY_CACHE = 1 << 40


@dataclass(eq=False)
class FusedStep:
    """State of a layer between its update and its attention.

    Attributes:
        layer: The updated layer.
        new: Rows of the new tokens for each stored tensor, [num_heads, query_length, 1, ...].
        reads: Number of times that attention has read the step.
    """

    layer: WrittenLayer
    new: tuple[torch.Tensor, ...]
    reads: int = 0

    @property
    def layout(self) -> FusedLayout:
        """Layout of the layer."""
        assert isinstance(self.layer.layout, FusedLayout)
        return self.layer.layout


# Updates leave their step here, because transformers passes only tensors to attention.
_updated: ContextVar[tuple[FusedStep, ...]] = ContextVar("_updated", default=())


def step_of_keys(keys: torch.Tensor) -> FusedStep | None:
    """Return the step of the fused layer whose `update` returned these keys, or None for keys of other layers.

    A step is forgotten after as many calls as its layout has readers.
    """
    for step in _updated.get():
        if step.layer.keys is keys:
            step.reads += 1
            if step.reads == step.layout.readers:
                _updated.set(tuple(other for other in _updated.get() if other is not step))
            return step
    return None


def takes_latents(keys: torch.Tensor) -> bool:
    """Return True if these keys belong to a layer whose layout attends over latents."""
    return any(step.layer.keys is keys and step.layout.attends_latents for step in _updated.get())


class FusedLayout(Layout):
    """Base of fused layouts. They exist in traced programs only, and attention must go through `attend`."""

    #: Number of times that a step attends over a layer.
    readers = 1
    #: True if keys and values are not expanded before attention.
    attends_latents = False

    def fused(self, layer: CacheLayer) -> CacheLayer:
        """Return an empty layer of the same policy, storage and sizes, in this layout."""
        assert layer.keys is not None
        assert layer.storage is not None
        batch_size, num_heads, _, head_dim = layer.keys.shape
        sizes = RowSizes(batch_size, num_heads, layer.storage.head_dim(head_dim))
        return CacheLayer(layer.policy, layer.storage, sizes, layout=self, device=layer.device)

    def update(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens [batch_size, num_heads, query_length, head_dim].

        Returns:
            The buffers, which only `attend` may read.
        """
        new = self.encoded(layer, key_states, value_states)
        self.write_before(layer, new)
        # Steps of another context are left from a trace that failed.
        others = (step for step in _updated.get() if step.layer.context is layer.context)
        _updated.set((*others, FusedStep(layer, new)))
        layer.advance(key_states.shape[2])
        keys, values = layer.keys, layer.keys if self.attends_latents else layer.values
        assert keys is not None
        assert values is not None
        return keys, values

    def stored(self, layer: WrittenLayer) -> tuple[torch.Tensor, ...]:
        """Return the buffers, in the order of `encoded`."""
        assert layer.storage is not None
        return tuple(getattr(layer, name) for name in layer.storage.parts)

    def encoded(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the stored form of the new rows, each [batch_size * num_heads, query_length, 1, ...]."""
        assert layer.storage is not None
        return layer.storage.encode(heads_as_batch(key_states), heads_as_batch(value_states))

    def write_before(self, layer: WrittenLayer, new: tuple[torch.Tensor, ...]) -> None:
        """Write the new rows that must be written before attention, each [num_heads, query_length, 1, ...]."""

    @abstractmethod
    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """Attend over the tokens that the layer holds after the step.

        Args:
            step: Step of the layer.
            query: [1, heads, query_length, head_dim].
            attention_mask: Mask made from the layout's `mask_positions`, or None.
            scaling: Factor on the scores.
            **extras: Further arguments of attention; none for `fusable_layers`.

        Returns:
            [1, query_length, heads, head_dim].
        """


@dataclass(frozen=True)
class FusedFullLayout(FusedLayout, kind="executorch_full"):
    """Layout for full policies: stored tensors are [num_heads, capacity, 1, dim].

    Attention is causal, so the mask is not read.
    """

    row_dims = ("num_heads", "capacity", "batch_size")

    def write_before(self, layer: WrittenLayer, new: tuple[torch.Tensor, ...]) -> None:
        """Write all new rows."""
        start = _start(layer, new[0].shape[1])
        for buffer, rows in zip(self.stored(layer), new, strict=True):
            torch.ops.llama.update_cache(rows, buffer, start)

    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """See `FusedLayout.attend`."""
        layer, (heads, query_length) = step.layer, query.shape[1:3]
        assert layer.keys is not None
        fold = fold_of(heads, layer.keys.shape[0], layer.policy.slot_count)
        operands = [query, layer.cumulative_length, *self.stored(layer)]
        single = _newest_if_single(_start(layer, query_length), query_length)
        return fused_attention(operands, single, "full", fold, layer.capacity, scaling)[0]


@dataclass(frozen=True)
class FusedRingLayout(FusedLayout, kind="executorch_ring"):
    """Layout for rings without rollback slots: stored tensors are [num_heads, capacity + 1, 1, dim].

    The extra last slot absorbs writes that must be discarded; it is never read. One token is written before attention,
    which then reads the filled slots without a mask, because a ring of one window is seen as a whole in any order.
    Several tokens attend over the previous ring and themselves under the mask, and are written afterwards.
    """

    row_dims = ("num_heads", "slots", "batch_size")

    def sizes(self, policy: SlotPolicy) -> Mapping[str, int]:
        """Return the number of slots, the extra one included."""
        assert policy.capacity is not None
        return {"slots": policy.capacity + 1}

    def mask_positions(self, layer: WrittenLayer, query_length: int) -> torch.Tensor:
        """Return positions of the ring before the step, then of the new tokens, because `attend` joins the two."""
        assert isinstance(layer.policy, RingPolicy)
        return layer.policy.positions_beside_new(layer.cumulative_length, query_length)

    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """See `FusedLayout.attend`; the mask is additive, [1, 1, query_length, capacity + query_length]."""
        layer, (heads, query_length) = step.layer, query.shape[1:3]
        assert layer.keys is not None
        assert attention_mask is not None
        stored = self.stored(layer)
        slot, reach, slots = _ring_slots(layer, query_length)
        for buffer, rows in zip(stored, step.new, strict=True):
            torch.ops.llama.update_cache(rows[:, :1], buffer, slot)
        fold = fold_of(heads, layer.keys.shape[0], layer.policy.slot_count)
        operands = [query, attention_mask[0, 0], slots, layer.cumulative_length, *stored, *step.new]
        single = _newest_if_single(reach, query_length)
        # The slots are passed through, because only this dependency keeps the writes below after the reads above.
        output, slots = fused_attention(operands, single, "ring", fold, layer.capacity, scaling)
        for buffer, rows in zip(stored, step.new, strict=True):
            torch.ops.llama.update_cache_with_indices(rows, buffer, 0, slots)
        return output


def _start(layer: WrittenLayer, query_length: int) -> int:
    """Return the length of the row as a symbolic integer, as the operators take it."""
    start = layer.context.once("start", lambda: layer.cumulative_length[0].item())
    torch._check(start >= 0)
    torch._check(start < layer.capacity)
    torch._check(start + query_length <= layer.capacity)
    return start


def _ring_slots(layer: WrittenLayer, query_length: int) -> tuple[int, int, torch.Tensor]:
    """Return where the tokens of a step go in a ring.

    Returns:
        The slot of a single token, or the extra slot if there are several; the newest filled slot if there is a single
        token; the slot of each token, int64 [num_heads, query_length], the extra slot for tokens already outside the
        window.
    """
    keys, spare = layer.keys, layer.capacity
    assert keys is not None
    assert spare is not None

    def read() -> tuple[int, int, torch.Tensor]:
        length = layer.cumulative_length
        slot: Any = torch.clamp(torch.remainder(length, spare) + (query_length - 1) * spare, max=spare)[0].item()
        reach: Any = torch.clamp(length, max=spare - 1)[0].item()
        torch._check(slot >= 0)
        torch._check(slot <= spare)
        torch._check(reach >= 0)
        offsets = torch.arange(query_length, device=layer.device)
        slots = torch.where(offsets < query_length - spare, spare, torch.remainder(length + offsets, spare))
        return slot, reach, slots.repeat(keys.shape[0], 1)

    return layer.context.once((spare, keys.shape[0]), read)


def heads_as_batch(states: torch.Tensor) -> torch.Tensor:
    """Reshape [batch_size, num_heads, length, dim] -> [batch_size * num_heads, length, 1, dim]."""
    return states.reshape(states.shape[0] * states.shape[1], states.shape[2], 1, states.shape[3])


def fold_of(heads: int, kv_heads: int, capacity: int) -> int:
    """Return how many query heads that share a key head become rows of one product.

    It is the largest number that leaves enough heads to run in parallel and is less than the capacity. The product has
    to read a slot per row, so a larger number would never be used, and its form could not be traced.
    """
    groups = heads // kv_heads
    enough = min(LEAST_PARALLEL_HEADS, heads)
    folds = range(2, min(groups + 1, capacity))
    return max((fold for fold in folds if groups % fold == 0 and heads // fold >= enough), default=1)


def _newest_if_single(newest: int, query_length: int) -> int:
    """Return the newest slot for a step of one token, or a negative symbolic number for several tokens."""
    return newest - _BEYOND_ANY_CACHE * (query_length - 1)


@dataclass(frozen=True)
class NativeLayout(FusedLayout, kind="native"):
    """Layout over `exportable_cache::attention` and `exportable_cache::write`, with tensors of several rows.

    Stored tensors are [batch_size * num_heads, capacity, 1, dim]. Programs with it run only where the compiled kernels
    of `kernels/` are loaded. A full layer is written before attention. A ring is written afterwards, because several
    tokens would overwrite slots that the first of them still see; attention reads the previous slots and the new rows.

    Attributes:
        chunked: A token sees its chunk, which is as long as the ring.
        masked: The mask is read, for layers that keep every token; otherwise attention is causal, within the ring's
            window.
        readers: Number of times that a step attends over the layer, because other layers may share its keys.
    """

    chunked: bool = False
    masked: bool = False
    readers: int = 1

    row_dims = ("rows_and_heads", "capacity", "one")

    def fused(self, layer: CacheLayer) -> CacheLayer:
        """See `FusedLayout.fused`."""
        tensors = dict(layer.named_state())
        for name in layer.storage.parts if layer.storage is not None else ():
            batch_size, num_heads, *sizes = tensors[name].shape
            tensors[name] = tensors[name].new_zeros(batch_size * num_heads, sizes[0], 1, sizes[1])
        return layer.with_layout(self, tensors)

    def encoded(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See `FusedLayout.encoded`."""
        if not isinstance(layer.storage, RoundedStorage):
            return super().encoded(layer, key_states, value_states)
        (keys, key_scales), (values, value_scales) = (
            torch.ops.exportable_cache.quantize(heads_as_batch(states), layer.storage.bits)
            for states in (key_states, value_states)
        )
        return keys, values, key_scales, value_scales

    def write_before(self, layer: WrittenLayer, new: tuple[torch.Tensor, ...]) -> None:
        """Write the new rows of a full layer."""
        if isinstance(layer.policy, FullPolicy):
            self._write(layer, new, None)

    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """See `FusedLayout.attend`; for any number of rows. `extras` are further arguments of `matmul_attention`."""
        layer, policy = step.layer, step.layer.policy
        is_full = isinstance(policy, FullPolicy)
        limit = getattr(policy, "window", 0)
        output = torch.ops.exportable_cache.attention(
            query,
            list(self.stored(layer)),
            step.new,
            layer.cumulative_length,
            scaling,
            _kept(policy),
            0 if self.chunked else limit,
            limit if self.chunked else 0,
            float(extras.get("softcap") or 0.0),
            _sinks(extras),
            self._bias(layer, attention_mask, extras),
        )
        if not is_full and step.reads == self.readers:
            self._write(layer, step.new, output)
        return output

    def _write(self, layer: WrittenLayer, new: tuple[torch.Tensor, ...], after: torch.Tensor | None) -> None:
        for buffer, rows in zip(self.stored(layer), new, strict=True):
            torch.ops.exportable_cache.write(rows, buffer, layer.cumulative_length, _kept(layer.policy), after)

    def _bias(
        self, layer: WrittenLayer, attention_mask: torch.Tensor | None, extras: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return what is added to the scores, [batch or 1, heads or 1, query_length, capacity], or None."""
        bias = extras.get("position_bias")
        if not self.masked:
            return bias
        # Imported here, because it imports transformers, which opening a bundle does not need.
        from ....cache.attention.functions import selected_mask

        capacity = _kept(layer.policy)
        attention_mask = selected_mask(extras.get("module"), attention_mask, extras, capacity, torch.float32)
        return attention_mask if bias is None else attention_mask + bias


@dataclass(frozen=True)
class NativeLatentLayout(NativeLayout, kind="native_latents"):
    """Layout for layers that keep one latent per token for all keys and values (DeepSeek's MLA), and one rotated key.

    Both are in one tensor [batch_size, capacity, 1, kv_lora_rank + qk_rope_head_dim]. Attention is over the latents:
    queries are multiplied by the part of the expansion that makes keys, and outputs by the part that makes values.
    Otherwise every step would expand every slot.
    """

    attends_latents = True

    def declare(self, layer: WrittenLayer) -> dict[str, StateTensor]:
        """Return the one state tensor."""
        assert layer.storage is not None
        return {"keys": StateTensor(*self.row_dims, "latent_and_key", dtype=layer.storage.parts["keys"].dtype)}

    def fused(self, layer: CacheLayer) -> CacheLayer:
        """See `FusedLayout.fused`."""
        tensors = dict(layer.named_state())
        keys, values = tensors["keys"], tensors.pop("values")
        tensors["keys"] = keys.new_zeros(keys.shape[0], keys.shape[2], 1, keys.shape[3] + values.shape[3])
        return layer.with_layout(self, tensors)

    def stored(self, layer: WrittenLayer) -> tuple[torch.Tensor, ...]:
        """See `FusedLayout.stored`."""
        return (dict(layer.named_state())["keys"],)

    def encoded(
        self, layer: WrittenLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See `FusedLayout.encoded`."""
        assert layer.storage is not None
        return (heads_as_batch(torch.cat(layer.storage.encode(key_states, value_states), dim=-1)),)

    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """See `FusedLayout.attend`; `module` in `extras` has the expansion."""
        module = extras.pop("module")
        latent = module.kv_b_proj.weight.shape[1]
        found = super().attend(step, latent_queries(module, query), attention_mask, scaling, **extras)
        return expanded_output(module, found[..., :latent])


def _kept(policy: SlotPolicy) -> int:
    """Return the number of slots that are never overwritten."""
    if isinstance(policy, FullPolicy):
        return policy.capacity
    return policy.sinks if isinstance(policy, SinkPolicy) else 0


def _sinks(extras: dict[str, Any]) -> torch.Tensor | None:
    """Return the sinks in float32, as the operator takes them, or None."""
    sinks = extras.get("sinks")
    if extras.get("s_aux") is not None:
        sinks = extras["s_aux"].reshape(1, -1, 1, 1)
    return None if sinks is None else sinks.float()


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
