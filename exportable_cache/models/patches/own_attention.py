"""Decoders that compute attention in code of their own (Bloom, CodeGen, Falcon, GPT-J): a target that fuses it is
given it through the attention interface.

Any other implementation finds the original. None of them is wrong: where a source has changed, the model is as it was,
and its attention in plain operators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface

from ...cache.attention.names import ATTENTION_NAMES
from .patch import Patch

if TYPE_CHECKING:
    import torch
    from torch import nn

#: What the names of targets' attention functions begin with; those that run anywhere keep to the original.
_OURS = ATTENTION_NAMES[0]
_REASON = "it computes attention in code of its own, which no target can fuse"


def fusing_attention(module: nn.Module) -> Callable | None:
    """The attention function of a target that fuses attention, None under any other implementation."""
    name = getattr(module.config, "_attn_implementation", None) or ""
    fuses = name.startswith(_OURS) and name not in ATTENTION_NAMES
    return AttentionInterface()[name] if fuses else None


def _where_fused(replacement: Callable) -> Callable[[Callable], Callable]:
    """A patch of a method that acts under such an implementation.

    Args:
        replacement: Takes the attention function and the method's arguments.
    """

    def patch(original: Callable) -> Callable:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attend = fusing_attention(self)
            if attend is None:
                return original(self, *args, **kwargs)
            return replacement(self, attend, *args, **kwargs)

        return method

    return patch


def _attn(
    self: nn.Module,
    attend: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    scaling = 1.0 / float(self.scale_attn)
    return attend(self, query, key, value, attention_mask, scaling=scaling)[0].transpose(1, 2), None


def _bloom_attention(
    self: nn.Module,
    attend: Callable,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    batch_size, query_length = hidden_states.shape[:2]
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    # One bias for every query, by the slot of the key.
    bias = alibi.view(batch_size, self.num_heads, 1, alibi.shape[-1])
    scaling = self.inv_norm_factor
    output, _ = attend(self, query, key, value, attention_mask, scaling=scaling, position_bias=bias)
    return self.dense(output.reshape(batch_size, query_length, self.hidden_size)) + residual, None


def _falcon_attention(
    self: nn.Module,
    attend: Callable,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # With alibi a model has no static cache at all.
    batch_size, query_length = hidden_states.shape[:2]
    parts = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    query, key = sys.modules[type(self).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attend(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5)
    return self.dense(output.reshape(batch_size, query_length, self.hidden_size)), None


def with_config(name: str) -> Callable[[nn.Module], None]:
    """Says to attention modules of a class what implementation they run with."""

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__ == name:
                module.config = model.config

    return prepare


PREPARATIONS = {
    "bloom": ("BloomAttention.config", with_config("BloomAttention")),
    "codegen": ("CodeGenAttention.config", with_config("CodeGenAttention")),
}


def _fused(file: str, name: str, replacement: Callable, *digests: str) -> tuple[Patch, ...]:
    return (Patch(file, name, _where_fused(replacement), _REASON, digests=digests, needed=False),)


PATCHES = {
    "bloom": _fused("bloom.modeling_bloom", "BloomAttention.forward", _bloom_attention, "f545c2095d22b66c"),
    "codegen": _fused("codegen.modeling_codegen", "CodeGenAttention._attn", _attn, "3c46930c6963e8fb"),
    "falcon": _fused("falcon.modeling_falcon", "FalconAttention.forward", _falcon_attention, "e154487989606dcd"),
    "gptj": _fused("gptj.modeling_gptj", "GPTJAttention._attn", _attn, "98aa510051cdcd79"),
}
