"""Layers over this package's operators: one kernel for every kind that keeps keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....cache.kernel import StateTensor
from ....cache.policies import FullPolicy, SinkPolicy
from ....cache.storage import RoundedStorage
from .fused_kernels import FusedKernel, FusedStep, heads_as_batch

if TYPE_CHECKING:
    from ....cache.layers import CacheLayer
    from ....cache.policies import SlotPolicy


@dataclass(frozen=True)
class NativeKernel(FusedKernel, kind="native"):
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
        return layer.with_kernel(self, tensors)

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
        """See `FusedKernel.attend`; for any number of rows. `extras` are further arguments of `matmul_attention`."""
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
class NativeLatentKernel(NativeKernel, kind="native_latents"):
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
        return layer.with_kernel(self, tensors)

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
        """See `FusedKernel.attend`; `module` of the extras has the expansion."""
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
