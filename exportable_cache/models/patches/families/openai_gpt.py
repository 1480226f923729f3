"""GPT and XLM: they take every token at every step, or keep keys and values in another argument.

With our caches their layers run here, with positions and masks from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput

from ....common.patch import Patch
from ..conditions import attention_function, kept_hidden_states, over_our_cache


def _step(
    self: Any, hidden_states: torch.Tensor, cache: Any, attention_mask: torch.Tensor | None
) -> tuple[torch.Tensor, Any]:
    """Return positions [batch, length] and mask [batch, 1, length, slots] of a step; `attention_mask` is padding's."""
    start = cache.get_query_offset() if hasattr(cache, "get_query_offset") else cache.get_seq_length()
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device) + start
    positions = positions.reshape(-1, hidden_states.shape[1])
    return positions, create_causal_mask(self.config, hidden_states, attention_mask, cache, positions)


def _split_heads(heads: int, *mixed: torch.Tensor) -> list[torch.Tensor]:
    """Reshape each [batch, length, heads * dim] to [batch, heads, length, dim]."""
    return [one.reshape(*one.shape[:2], heads, -1).transpose(1, 2) for one in mixed]


def _gpt(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    cache: Any,
    original: Callable,
    logits_to_keep: int | torch.Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutput:
    """Run GPT (Radford et al. 2018), with norms after attention and feed-forward, and learned positions."""
    model = self.transformer
    hidden_states = model.tokens_embed(input_ids) if inputs_embeds is None else inputs_embeds
    positions, mask = _step(model, hidden_states, cache, attention_mask)
    hidden_states = hidden_states + model.positions_embed(positions if position_ids is None else position_ids)
    if token_type_ids is not None:
        hidden_states = hidden_states + model.tokens_embed(token_type_ids)
    attend = attention_function(self.config)
    for index, block in enumerate(model.h):
        attention = block.attn
        query, key, value = _split_heads(attention.n_head, *attention.c_attn(hidden_states).chunk(3, dim=-1))
        key, value = cache.update(key, value, index)
        scaling = value.shape[-1] ** -0.5 if attention.scale else 1.0
        output, _ = attend(attention, query, key, value, mask, scaling=scaling)
        output = attention.c_proj(output.reshape(hidden_states.shape))
        hidden_states = block.ln_1(hidden_states + output)
        hidden_states = block.ln_2(hidden_states + block.mlp(hidden_states))
    return CausalLMOutput(logits=self.lm_head(kept_hidden_states(hidden_states, logits_to_keep)))


def _xlm(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    langs: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    cache: Any,
    original: Callable,
    logits_to_keep: int | torch.Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutput:
    """Run causal XLM (Lample and Conneau 2019); without `langs` no language embedding is added, as upstream."""
    model = self.transformer
    hidden_states = model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    positions, mask = _step(model, hidden_states, cache, attention_mask)
    hidden_states = hidden_states + model.position_embeddings(positions if position_ids is None else position_ids)
    if langs is not None and model.use_lang_emb and model.n_langs > 1:
        hidden_states = hidden_states + model.lang_embeddings(langs)
    if token_type_ids is not None:
        hidden_states = hidden_states + model.embeddings(token_type_ids)
    hidden_states = model.layer_norm_emb(hidden_states)
    attend = attention_function(self.config)
    for index, attention in enumerate(model.attentions):
        query, key, value = _split_heads(
            attention.n_heads,
            *(linear(hidden_states) for linear in (attention.q_lin, attention.k_lin, attention.v_lin)),
        )
        key, value = cache.update(key, value, index)
        output, _ = attend(attention, query, key, value, mask, scaling=attention.head_dim**-0.5)
        output = attention.out_lin(output.reshape(hidden_states.shape))
        hidden_states = model.layer_norm1[index](hidden_states + output)
        hidden_states = model.layer_norm2[index](hidden_states + model.ffns[index](hidden_states))
    return CausalLMOutput(logits=self.pred_layer(kept_hidden_states(hidden_states, logits_to_keep))[0])


PATCHES = {
    "openai-gpt": (
        Patch(
            "openai.modeling_openai",
            "OpenAIGPTLMHeadModel.forward",
            over_our_cache(_gpt),
            "it takes every token at every step",
            digests=("30d908d83c52daf9", "83d1290d0b315add"),
            source="OpenAIGPTLMHeadModel OpenAIGPTModel Block MLP Attention",
        ),
    ),
    "xlm": (
        Patch(
            "xlm.modeling_xlm",
            "XLMWithLMHeadModel.forward",
            over_our_cache(_xlm),
            "it takes every token at every step, and a cache as another argument",
            digests=("9154282c41355d80", "3f864dd028bdefd5", "c0691cb98a2c3bff"),
            source="XLMWithLMHeadModel XLMModel MultiHeadAttention",
        ),
    ),
}
