"""Full-attention layers through ExecuTorch's own operators, whose cost follows the filled length, not the allocated one.

`llama::update_cache` and `llama::custom_sdpa` keep the cache as [batch, slots, heads, dim] and take one start position. They
know causal attention and nothing else, so each layer of a model is looked at first: see `fusable_layers`.
"""

from __future__ import annotations

from typing import Any

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  registers torch.ops.llama, here and in the runtime
import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from ...attention import EXTRAS, matmul_attention
from ...cache import ExportableCache
from ...layers import FullLayer, StateTensor
from ...layout import cache_argument
from ...masks import register_masks
from ...program import attention_of
from ...seq2seq import ExportableEncoderDecoderCache

EXECUTORCH_ATTENTION = "exportable_cache_executorch"
_PROBE_ATTENTION = "exportable_cache_probe"
_PROBE_LENGTH = 3

# Start position by the tensor it belongs to: of the length it was read from, and of the keys that attention is given.
_start_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


class FusedFullLayer(FullLayer):
    """A `FullLayer` of one row in the layout of ExecuTorch's operators. It exists in traced programs only.

    Keys and values are [1, capacity, num_heads, head_dim].
    """

    state = {
        "keys": StateTensor("batch_size", "capacity", "num_heads", "head_dim"),
        "values": StateTensor("batch_size", "capacity", "num_heads", "value_head_dim"),
        "cumulative_length": StateTensor("batch_size", dtype=torch.int64),
    }

    @classmethod
    def like(cls, layer: FullLayer) -> FusedFullLayer:
        """An empty layer of the same sizes."""
        batch_size, num_heads, capacity, head_dim = layer.keys.shape
        return cls(batch_size, num_heads, head_dim, capacity, dtype=layer.keys.dtype, device=layer.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens; attention must go through `executorch_attention`.

        Args:
            key_states: [1, num_heads, query_length, head_dim].
            value_states: [1, num_heads, query_length, head_dim].

        Returns:
            The buffers, keys and values [1, capacity, num_heads, head_dim].
        """
        start = self._start(key_states.shape[2])
        torch.ops.llama.update_cache(key_states.transpose(1, 2), self.keys, start)
        torch.ops.llama.update_cache(value_states.transpose(1, 2), self.values, start)
        _start_of[self.keys] = start
        self.advance(key_states.shape[2])
        return self.keys, self.values

    def _start(self, query_length: int) -> int:
        """The row's length as a symbolic integer, which is what the operators take; read once for all layers of a step."""
        if self.cumulative_length not in _start_of:
            start = self.cumulative_length[0].item()
            torch._check(start >= 0)
            torch._check(start < self.capacity)
            torch._check(start + query_length <= self.capacity)
            _start_of[self.cumulative_length] = start
        return _start_of[self.cumulative_length]


def executorch_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Fused attention for the keys of a `FusedFullLayer`, `matmul_attention` for all others.

    Args:
        query: [1, heads, q_length, head_dim].
        key, value: What the cache layer returned.
        attention_mask: Ignored for a fused layer, which is causal.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.

    Returns:
        [1, q_length, heads, head_dim], and None for the weights.
    """
    start = _start_of.get(key)
    if start is None:
        return matmul_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return torch.ops.llama.custom_sdpa(query.transpose(1, 2), key, value, start, None, 0.0, True, scaling), None


def fuse_layers(model: PreTrainedModel, cache: ExportableCache) -> ExportableCache:
    """The cache with its fusable full layers in the operators' layout, and all others as they are."""
    if isinstance(cache, ExportableEncoderDecoderCache):
        # The probe below feeds a text decoder, and T5's family has a position bias.
        return cache
    fusable = fusable_layers(model, cache)
    return ExportableCache(
        [FusedFullLayer.like(layer) if fuse else layer for layer, fuse in zip(cache.layers, fusable, strict=True)]
    )


@torch.no_grad()
def fusable_layers(model: PreTrainedModel, cache: ExportableCache) -> list[bool]:
    """Which layers the fused operators compute exactly, found by running a short prompt through the model.

    Such a layer keeps every token of one row in float32, keys and values of one size, and its attention goes once through
    the attention interface with the very tensors the cache returned, a purely causal mask, and neither soft-capping, nor
    sinks, nor a position bias. (The kernel gives not-a-number in bfloat16, and has no other mask than causal that is fast.)
    """
    calls: dict[int, list[bool]] = {}
    probe = ExportableCache.from_model(model, _PROBE_LENGTH, attn_implementation=None)

    def record(module, query, key, value, attention_mask, **kwargs):
        causal = torch.ones(_PROBE_LENGTH, _PROBE_LENGTH, dtype=torch.bool).tril()
        for index, layer in enumerate(probe.layers):
            if isinstance(layer, FullLayer) and key is layer.keys and value is layer.values:
                is_plain = all(kwargs.get(name) is None for name in (*EXTRAS, "indices"))
                is_causal = attention_mask is not None and torch.equal(
                    (attention_mask == 0).reshape(-1, _PROBE_LENGTH), causal.repeat(attention_mask.shape[0], 1)
                )
                calls.setdefault(index, []).append(is_plain and is_causal)
        return matmul_attention(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_PROBE_ATTENTION, record)
    register_masks(_PROBE_ATTENTION)
    with attention_of(model, _PROBE_ATTENTION):
        ids = torch.zeros(1, _PROBE_LENGTH, dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=True, **{cache_argument(model): probe})
    return [
        type(layer) is FullLayer
        and layer.keys.shape == layer.values.shape
        and layer.keys.shape[0] == 1
        and layer.keys.dtype == torch.float32
        and calls.get(index) == [True]
        for index, layer in enumerate(cache.layers)
    ]


AttentionInterface.register(EXECUTORCH_ATTENTION, executorch_attention)
register_masks(EXECUTORCH_ATTENTION)
