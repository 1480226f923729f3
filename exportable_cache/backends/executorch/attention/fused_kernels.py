"""Kernels over ExecuTorch's own operators, whose cost follows the filled length, not the allocated one.

`llama::update_cache`, `llama::update_cache_with_indices` and `llama::custom_sdpa` (extension/llm/custom_ops of
ExecuTorch 1.4) take a cache as [batch, slots, heads, dim]. A program of one row gives them its heads for the batch,
[num_heads, slots, 1, dim]: what a head reads then lies together, instead of a slot's heads. One program serves steps of
one token and of several: the form of attention is chosen at run time, per layer, see `attention_forms`.

Keys and values in 8 bits are written by the same operators, and read as far as they are filled. ExecuTorch's own
attention over such a cache, `llama::custom_quantized_sdpa`, rounds the queries as well, and is 2.5 times as slow as the
one in float32 on a full cache here. So the filled slots are made float32 by one kernel, into memory that all layers
share, and attended to by the operator that float caches use.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....cache.layers import CacheLayer, RowSizes
from ....cache.layout import Layout, StateTensor
from ....cache.policies import FullPolicy, RingPolicy, SinkPolicy
from ....cache.storage import RoundedStorage
from .forms import fused_attention

if TYPE_CHECKING:
    from ....cache.layers import CacheLayer
    from ....cache.policies import SlotPolicy


#: The operator runs its heads in parallel: folding leaves at least this many, or all there are.
LEAST_PARALLEL_HEADS = 4

# Larger than any cache: what makes a step of several tokens miss a bound that a step of one is held to.
_SEVERAL = 1 << 40


@dataclass(eq=False)
class FusedStep:
    """A layer between its update and its attention.

    Attributes:
        layer: What was updated.
        new: What its new tokens add to each of the stored tensors, [num_heads, query_length, 1, ...].
        asked: How often attention has asked for it.
    """

    layer: CacheLayer
    new: tuple[torch.Tensor, ...]
    asked: int = 0

    @property
    def layout(self) -> FusedLayout:
        """Layout of the layer."""
        assert isinstance(self.layer.layout, FusedLayout)
        return self.layer.layout


# Transformers calls attention with tensors alone: this is where the updates that come before it leave what attention
# needs.
_updated: ContextVar[tuple[FusedStep, ...]] = ContextVar("_updated", default=())


def updated_just_now(keys: torch.Tensor) -> FusedStep | None:
    """The layer whose `update` has returned these keys in this step, or None where they are not of a fused layer; asked
    as often as its kernel has readers.
    """
    for step in _updated.get():
        if step.layer.keys is keys:
            step.asked += 1
            if step.asked == step.layout.readers:
                _updated.set(tuple(other for other in _updated.get() if other is not step))
            return step
    return None


def takes_latents(keys: torch.Tensor) -> bool:
    """Whether these keys are of a layer whose kernel attends over latents."""
    return any(step.layer.keys is keys and step.layout.attends_latents for step in _updated.get())


class FusedLayout(Layout):
    """What these kernels share. They exist in traced programs only, and attention must go through `attend`."""

    #: Times that a step attends over a layer.
    readers = 1
    #: Whether keys and values are not expanded before attention.
    attends_latents = False

    def fused(self, layer: CacheLayer) -> CacheLayer:
        """An empty layer of the same policy, storage and sizes, in this kernel's layout."""
        assert layer.keys is not None
        assert layer.storage is not None
        batch_size, num_heads, _, head_dim = layer.keys.shape
        sizes = RowSizes(batch_size, num_heads, layer.storage.head_dim(head_dim))
        return CacheLayer(layer.policy, layer.storage, sizes, layout=self, device=layer.device)

    def update(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens [batch_size, num_heads, query_length, head_dim], and return the buffers, which only
        `attend` reads.
        """
        new = self.encoded(layer, key_states, value_states)
        self.write_before(layer, new)
        # Those of an earlier step are what a trace that failed has left.
        others = (step for step in _updated.get() if step.layer.context is layer.context)
        _updated.set((*others, FusedStep(layer, new)))
        layer.advance(key_states.shape[2])
        keys, values = layer.keys, layer.keys if self.attends_latents else layer.values
        assert keys is not None
        assert values is not None
        return keys, values

    def stored(self, layer: CacheLayer) -> tuple[torch.Tensor, ...]:
        """The buffers, in the order of `encoded`."""
        assert layer.storage is not None
        return tuple(getattr(layer, name) for name in layer.storage.parts)

    def encoded(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What is kept of new tokens, [batch_size * num_heads, query_length, 1, ...]."""
        assert layer.storage is not None
        return layer.storage.encode(heads_as_batch(key_states), heads_as_batch(value_states))

    def write_before(self, layer: CacheLayer, new: tuple[torch.Tensor, ...]) -> None:
        """Write the new rows, each [num_heads, query_length, 1, ...], as far as that is done before attention."""

    @abstractmethod
    def attend(
        self,
        step: FusedStep,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **extras: Any,
    ) -> torch.Tensor:
        """Attention over what the layer holds after the step.

        Args:
            step: Of the layer.
            query: [1, heads, query_length, head_dim].
            attention_mask: As the kernel's `mask_positions` make it, or None.
            scaling: Factor on the scores.
            **extras: What attention is given besides; of `fusable_layers` there is nothing.

        Returns:
            [1, query_length, heads, head_dim].
        """


@dataclass(frozen=True)
class FusedFullLayout(FusedLayout, kind="executorch_full"):
    """Of a full policy: stored tensors are [num_heads, capacity, 1, dim]. The mask is not looked at: attention is
    causal.
    """

    row_dims = ("num_heads", "capacity", "batch_size")

    def write_before(self, layer: CacheLayer, new: tuple[torch.Tensor, ...]) -> None:
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
        layer, (heads, query_length) = step.layer, query.shape[1:3]
        assert layer.keys is not None
        fold = fold_of(heads, layer.keys.shape[0])
        operands = [query, layer.cumulative_length, *self.stored(layer)]
        single = _newest_if_single(_start(layer, query_length), query_length)
        return fused_attention(operands, single, "full", fold, layer.capacity, scaling)[0]


@dataclass(frozen=True)
class FusedRingLayout(FusedLayout, kind="executorch_ring"):
    """Of a ring without rollback slots: stored tensors are [num_heads, capacity + 1, 1, dim].

    The last slot takes what is to be written nowhere, and is never read. One token is written before attention, which
    then runs over the filled slots without a mask: in a ring of exactly one window all of them are seen, and their
    order does not matter. Several attend over the ring as it was plus themselves, under the mask, and are written after
    that.
    """

    row_dims = ("num_heads", "slots", "batch_size")

    def sizes(self, policy: SlotPolicy) -> Mapping[str, int]:
        assert policy.capacity is not None
        return {"slots": policy.capacity + 1}

    def mask_positions(self, layer: CacheLayer, query_length: int) -> torch.Tensor:
        # Of the ring before this step and the new tokens after it, for any number of them: `attend` joins the two.
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
        slot, reach, slots = _places(layer, query_length)
        for buffer, rows in zip(stored, step.new, strict=True):
            torch.ops.llama.update_cache(rows[:, :1], buffer, slot)
        fold = fold_of(heads, layer.keys.shape[0])
        operands = [query, attention_mask[0, 0], slots, layer.cumulative_length, *stored, *step.new]
        single = _newest_if_single(reach, query_length)
        # The slots are handed through: nothing else keeps the writes below from being scheduled before the reads above.
        output, slots = fused_attention(operands, single, "ring", fold, layer.capacity, scaling)
        for buffer, rows in zip(stored, step.new, strict=True):
            torch.ops.llama.update_cache_with_indices(rows, buffer, 0, slots)
        return output


def _start(layer: CacheLayer, query_length: int) -> int:
    """The row's length as a symbolic integer, which is what the operators take."""
    start = layer.context.once("start", lambda: layer.cumulative_length[0].item())
    torch._check(start >= 0)
    torch._check(start < layer.capacity)
    torch._check(start + query_length <= layer.capacity)
    return start


def _places(layer: CacheLayer, query_length: int) -> tuple[int, int, torch.Tensor]:
    """Where the tokens of a step go in a ring.

    Returns:
        The slot of a single token, or the spare one where there are several; the newest filled slot if the token is
        single; and the slot of each token, int64 [num_heads, query_length], the spare one for those already past the
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
    """[batch_size, num_heads, length, dim] -> [batch_size * num_heads, length, 1, dim]."""
    return states.reshape(states.shape[0] * states.shape[1], states.shape[2], 1, states.shape[3])


def fold_of(heads: int, kv_heads: int) -> int:
    """How many query heads that share a key head become rows of one product: the most that leave enough heads in
    parallel.
    """
    groups = heads // kv_heads
    enough = min(LEAST_PARALLEL_HEADS, heads)
    return max(fold for fold in range(1, groups + 1) if groups % fold == 0 and heads // fold >= enough)


def _newest_if_single(newest: int, query_length: int) -> int:
    """The newest slot to read of a step of one token, below zero for several: symbolic, as one number that is compared
    once.
    """
    return newest - _SEVERAL * (query_length - 1)


@dataclass(frozen=True)
class NativeLayout(FusedLayout, kind="native"):
    """Over `exportable_cache::attention` and `exportable_cache::write`: stored tensors are [batch_size * num_heads,
    capacity, 1, dim]. Programs with it run only where the compiled kernels of `kernels/` are loaded.

    A full layer is written before attention. A ring is written after it, as a step of several tokens would write over
    what its first ones still see: attention is over the slots as they were and the new rows beside them.

    Attributes:
        chunked: A token sees those of its own chunk, which is as long as the ring.
        masked: The mask is looked at, of a layer that keeps every token; without it attention is causal, within the
            ring's window.
        readers: Times that a step attends over the layer: others may share its keys.
    """

    chunked: bool = False
    masked: bool = False
    readers: int = 1

    row_dims = ("rows_and_heads", "capacity", "one")

    def fused(self, layer: CacheLayer) -> CacheLayer:
        tensors = dict(layer.named_state())
        for name in layer.storage.parts if layer.storage is not None else ():
            batch_size, num_heads, *sizes = tensors[name].shape
            tensors[name] = tensors[name].new_zeros(batch_size * num_heads, sizes[0], 1, sizes[1])
        return layer.with_layout(self, tensors)

    def encoded(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if not isinstance(layer.storage, RoundedStorage):
            return super().encoded(layer, key_states, value_states)
        (keys, key_scales), (values, value_scales) = (
            torch.ops.exportable_cache.quantize(heads_as_batch(states), layer.storage.bits)
            for states in (key_states, value_states)
        )
        return keys, values, key_scales, value_scales

    def write_before(self, layer: CacheLayer, new: tuple[torch.Tensor, ...]) -> None:
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
        if not is_full and step.asked == self.readers:
            self._write(layer, step.new, output)
        return output

    def _write(self, layer: CacheLayer, new: tuple[torch.Tensor, ...], after: torch.Tensor | None) -> None:
        for buffer, rows in zip(self.stored(layer), new, strict=True):
            torch.ops.exportable_cache.write(rows, buffer, layer.cumulative_length, _kept(layer.policy), after)

    def _bias(
        self, layer: CacheLayer, attention_mask: torch.Tensor | None, extras: dict[str, Any]
    ) -> torch.Tensor | None:
        """What is added to the scores, [batch or 1, heads or 1, query_length, capacity]."""
        bias = extras.get("position_bias")
        if not self.masked:
            return bias
        if extras.get("indices") is not None:
            # With it comes transformers, which opening a bundle does without.
            from ....cache.attention.functions import among_indices

            capacity = _kept(layer.policy)
            attention_mask = among_indices(attention_mask, extras["indices"], capacity, torch.float32)
        return attention_mask if bias is None else attention_mask + bias


@dataclass(frozen=True)
class NativeLatentLayout(NativeLayout, kind="native_latents"):
    """Of layers that keep a latent of a token for all of its keys and values (DeepSeek's MLA), and one rotated key:
    side by side in one tensor [batch_size, capacity, 1, kv_lora_rank + qk_rope_head_dim].

    Latents are attended to as they are: queries are taken to where latents are, by the part of the expansion that makes
    keys, and what comes out is expanded by the part that makes values. Without that, every step expands every slot.
    """

    attends_latents = True

    def declare(self, layer: CacheLayer) -> dict[str, StateTensor]:
        assert layer.storage is not None
        return {"keys": StateTensor(*self.row_dims, "latent_and_key", dtype=layer.storage.parts["keys"].dtype)}

    def fused(self, layer: CacheLayer) -> CacheLayer:
        tensors = dict(layer.named_state())
        keys, values = tensors["keys"], tensors.pop("values")
        tensors["keys"] = keys.new_zeros(keys.shape[0], keys.shape[2], 1, keys.shape[3] + values.shape[3])
        return layer.with_layout(self, tensors)

    def stored(self, layer: CacheLayer) -> tuple[torch.Tensor, ...]:
        return (dict(layer.named_state())["keys"],)

    def encoded(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
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
        """See `FusedLayout.attend`; `module` of the extras has the expansion."""
        module = extras.pop("module")
        batch_size, heads, query_length = query.shape[:3]
        size = module.qk_nope_head_dim
        latent = module.kv_b_proj.weight.shape[1]
        expansion = module.kv_b_proj.weight.view(heads, size + module.v_head_dim, latent)
        plain, rotated = query.split([size, query.shape[3] - size], dim=-1)
        taken = _by_head(plain, expansion[:, :size])
        found = super().attend(step, torch.cat([taken, rotated], dim=-1), attention_mask, scaling, **extras)
        values = found[..., :latent].transpose(1, 2)
        return _by_head(values, expansion[:, size:].transpose(1, 2)).transpose(1, 2)


def _by_head(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, dim] times [heads, dim, other]: [batch, heads, length, other]."""
    batch_size, heads, length, dim = states.shape
    rows = states.transpose(0, 1).reshape(heads, batch_size * length, dim)
    return torch.bmm(rows, weights).reshape(heads, batch_size, length, weights.shape[2]).transpose(0, 1)


def _kept(policy: SlotPolicy) -> int:
    """Slots that are never written again."""
    if isinstance(policy, FullPolicy):
        return policy.capacity
    return policy.sinks if isinstance(policy, SinkPolicy) else 0


def _sinks(extras: dict[str, Any]) -> torch.Tensor | None:
    """float32, as the operator takes them."""
    sinks = extras.get("sinks")
    if extras.get("s_aux") is not None:
        sinks = extras["s_aux"].reshape(1, -1, 1, 1)
    return None if sinks is None else sinks.float()
