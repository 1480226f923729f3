"""Attention that targets can fuse, in models that do not use transformers' attention interface or that expand latents.

The first are Bloom, CodeGen, Falcon and GPT-J, the second DeepSeek V2 and similar models. With other implementations
the originals run. None of them is wrong, so a changed source is left alone, and its attention is not fused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AttentionInterface

from ....cache.attention import ATTENTION, ATTENTION_NAMES
from ....cache.attention.operators import takes_latents
from ....common.compat.torch import has_hooks
from ....common.patch import Patch
from ...quantized_rows import is_quantized

if TYPE_CHECKING:
    import torch

#: Prefix of the names of targets' attention functions; the portable ones run the original.
_OURS = ATTENTION_NAMES[0]
_REASON = "it does not use the attention interface, so no target can fuse its attention"


def fusing_attention(module: Any) -> Callable | None:
    """Return the attention function of a target that fuses attention, or None.

    It is None for other implementations, and for unprepared models, because the patch applies to the whole class.
    """
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    fuses = name.startswith(_OURS) and name not in ATTENTION_NAMES
    return AttentionInterface()[name] if fuses else None


def _where_fused(replacement: Callable) -> Callable[[Callable], Callable]:
    """Create a patch of a method that applies under such an implementation.

    Args:
        replacement: Function with the attention function and the method's arguments.
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
    self: Any,
    attend: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    scaling = 1.0 / float(self.scale_attn)
    return attend(self, query, key, value, attention_mask, scaling=scaling)[0].transpose(1, 2), None


def _bloom_attention(
    self: Any,
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
    # One bias for all queries, by the slot of the key.
    bias = alibi.view(batch_size, self.num_heads, 1, alibi.shape[-1])
    scaling = self.inv_norm_factor
    output, _ = attend(self, query, key, value, attention_mask, scaling=scaling, position_bias=bias)
    return self.dense(output.reshape(batch_size, query_length, self.hidden_size)) + residual, None


def _falcon_attention(
    self: Any,
    attend: Callable,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # ALiBi is not handled, because models with it cannot use a static cache.
    batch_size, query_length = hidden_states.shape[:2]
    parts = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    query, key = sys.modules[type(self).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attend(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5)
    return self.dense(output.reshape(batch_size, query_length, self.hidden_size)), None


def _latents(original: Callable) -> Callable:
    """Replace `expand_kv` to pass latents through if the attention function takes them."""

    def expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config._attn_implementation == ATTENTION:
            passes = can_absorb(self) and takes_latents(kv_nope)
        else:
            takes = getattr(fusing_attention(self), "takes_latents", None)
            passes = takes is not None and takes(kv_nope)
        return (kv_nope, k_rot) if passes else original(self, kv_nope, k_rot)

    return expand_kv


def can_absorb(module: Any) -> bool:
    """Return True if the weights that expand latents can be multiplied by queries and outputs instead."""
    linear = module.kv_b_proj
    is_plain = type(linear) is nn.Linear and not has_hooks(linear) and not hasattr(linear, "_hf_hook")
    return is_plain and linear.bias is None and not is_quantized(linear.weight)


def with_config(name: str) -> Callable[[nn.Module], None]:
    """Create a function that gives attention modules of a class the config, which names their implementation."""

    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if type(module).__name__ == name:
                module.config = model.config

    return prepare


PREPARATIONS = {
    "bloom": ("", with_config("BloomAttention")),
    "codegen": ("", with_config("CodeGenAttention")),
}


#: Model type, folder of the modeling file, class.
_OF_LATENTS = (
    ("axk1", "axk1", "AXK1Attention"),
    ("axk2", "axk2", "AXK2Attention"),
    ("bailing_hybrid", "bailing_hybrid", "BailingHybridAttention"),
    ("deepseek_v2", "deepseek_v2", "DeepseekV2Attention"),
    ("deepseek_v3", "deepseek_v3", "DeepseekV3Attention"),
    ("deepseek_v32", "deepseek_v32", "DeepseekV32Attention"),
    ("dots3_note_text", "dots3_note", "Dots3NoteTextAttention"),
    ("glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteAttention"),
    ("glm_moe_dsa", "glm_moe_dsa", "GlmMoeDsaAttention"),
    ("hy_v4", "hy_v4", "HYV4Attention"),
    ("kimi_linear", "kimi_linear", "KimiLinearAttention"),
    ("longcat_flash", "longcat_flash", "LongcatFlashMLA"),
    ("minicpm3", "minicpm3", "MiniCPM3Attention"),
    ("mistral4", "mistral4", "Mistral4Attention"),
    ("mistral_large4_text", "mistral_large4", "MistralLarge4TextAttention"),
    ("youtu", "youtu", "YoutuAttention"),
)


def _fused(file: str, name: str, replacement: Callable, *digests: str) -> tuple[Patch, ...]:
    return (Patch(file, name, _where_fused(replacement), _REASON, digests=digests, needed=False),)


PATCHES = {
    "bloom": _fused("bloom.modeling_bloom", "BloomAttention.forward", _bloom_attention, "f545c2095d22b66c"),
    "codegen": _fused("codegen.modeling_codegen", "CodeGenAttention._attn", _attn, "3c46930c6963e8fb"),
    "falcon": _fused("falcon.modeling_falcon", "FalconAttention.forward", _falcon_attention, "e154487989606dcd"),
    "gptj": _fused("gptj.modeling_gptj", "GPTJAttention._attn", _attn, "98aa510051cdcd79"),
    **{
        model_type: (
            Patch(
                f"{file}.modeling_{file}",
                f"{owner}.expand_kv",
                _latents,
                "it expands the latents of every slot in every step",
                digests=("d64ff0c4b22ebe11",),
                needed=False,
            ),
        )
        for model_type, file, owner in _OF_LATENTS
    },
}
