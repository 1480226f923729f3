"""Methods of transformers' modules that look at the values of tensors, which no traced step can.

| method | models | why | upstream (v5.23.0, src/transformers/models) |
|---|---|---|---|
| `forward` of position tables | MVP, RoFormer, TrOCR | `arange(past, past + n)`: a length that depends on data | mvp/modeling_mvp.py, roformer/..., trocr/... |
| `forward` of experts | DBRX, LongCat Flash, NLLB-MoE, Step 3.7, Switch | loop over the experts that were hit | dbrx/modeling_dbrx.py, longcat_flash/..., nllb_moe/..., step3p7/..., switch_transformers/... |
| `forward` of decoders | BigBird, BioGPT, Megatron-BERT, RemBERT, RoFormer | make a mask as long as what was seen, which no runtime can plan memory for | big_bird/modeling_big_bird.py, biogpt/..., megatron_bert/..., rembert/..., roformer/... |
| `GitModel.forward` | GIT | asks whether anything was seen, to widen a mask over its picture | git/modeling_git.py |
| `XmodOutput.forward` | X-MOD | takes out the rows of each language | xmod/modeling_xmod.py |
| `MptAttention.forward` | MPT | slices its position bias by the tokens seen | mpt/modeling_mpt.py |

A replacement acts only where values cannot be read, that is under a tracer, and hands everything else to the original. Each
has a test that fails once the original can be traced (tests/patches/test_transformers_methods.py).

CTRL sets its table of positions, an `nn.Buffer`, anew in every step (ctrl/modeling_ctrl.py). TorchDynamo 2.13 does not know the
attribute `persistent` that `Module.__setattr__` then asks for (torch/nn/modules/module.py), so the buffer is made a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import create_causal_mask

from .marked import patch_forwards
from .transformers_encoders import patch_encoders
from .transformers_rotary import patch_rotary


def patch_methods(model: nn.Module) -> list[str]:
    """Replace the methods of the table in the classes that this model is made of. Calling it again changes nothing.

    Returns:
        Names of the patched classes, of those of `transformers_rotary`, and of the methods of `transformers_encoders`, that the model
        has need of, sorted.
    """
    found = patch_forwards(model, METHODS, _only_traced)
    for module in model.modules():
        if type(module).__name__ == "CTRLModel":
            found.add("CTRLModel")
            is_persistent = "pos_encoding" not in module._non_persistent_buffers_set
            module.register_buffer("pos_encoding", module.pos_encoding.detach(), persistent=is_persistent)
    return sorted({*found, *patch_encoders(model), *patch_rotary(model)})


def _only_traced(replacement: Callable, original: Callable) -> Callable:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return replacement(self, *args, original=original, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _positions(
    self: nn.Embedding,
    ids_or_shape: torch.Tensor | torch.Size,
    past_key_values_length: int | torch.Tensor = 0,
    position_ids: torch.Tensor | None = None,
    *,
    original: Callable,
) -> torch.Tensor:
    """Positions as `past + arange(n)`, n being a size. Some tables are given ids, some their shape [batch, length]."""
    if position_ids is None:
        shape = ids_or_shape.shape if isinstance(ids_or_shape, torch.Tensor) else ids_or_shape
        position_ids = past_key_values_length + torch.arange(shape[1], device=self.weight.device)
    return original(self, ids_or_shape, past_key_values_length, position_ids)


def mix_experts(
    hidden_states: torch.Tensor, weights: torch.Tensor, count: int, expert: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Every expert on every token, weighted: as static as a computation over experts can be.

    Args:
        hidden_states: [tokens, hidden].
        weights: [tokens, count], 0 where an expert was not chosen.
        count: Experts.
        expert: `(index, hidden_states) -> [tokens, hidden]`.
    """
    output = torch.zeros_like(hidden_states)
    for index in range(count):
        output = output + (expert(index, hidden_states) * weights[:, index, None]).to(hidden_states.dtype)
    return output


def _weights_by_expert(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, count: int) -> torch.Tensor:
    """[tokens, k] indices and weights -> [tokens, count]."""
    return (F.one_hot(top_k_index, count).to(top_k_weights.dtype) * top_k_weights[..., None]).sum(dim=1)


def _dbrx_experts(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    batch_size = hidden_states.shape[0]
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = self.mlp.w1.view(shape), self.mlp.v1.view(shape), self.mlp.w2.view(shape)
    output = mix_experts(
        hidden_states.reshape(-1, self.hidden_size),
        _weights_by_expert(top_k_index, top_k_weights, self.num_experts),
        self.num_experts,
        lambda index, states: self.mlp(states, w1[index], v1[index], w2[index]),
    )
    return output.view(batch_size, -1, self.hidden_size)


def _longcat_experts(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    weights = _weights_by_expert(top_k_index, top_k_weights, self.total_experts)

    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(states, self.gate_up_proj[index]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])

    output = mix_experts(hidden_states, weights, self.num_routed_experts, expert)
    # The experts behind the routed ones compute nothing: their tokens pass as they are.
    return output + hidden_states * weights[:, self.num_routed_experts :].sum(dim=1, keepdim=True).to(
        hidden_states.dtype
    )


def _nllb_experts(
    self: nn.Module,
    hidden_states: torch.Tensor,
    router_mask: torch.Tensor,
    router_probs: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    # What is never written to reads 0 in `router_mask`, upstream as well: one column per choice.
    chosen = F.one_hot(router_mask, self.num_experts).to(router_probs.dtype)
    weights = (chosen * router_probs[..., None]).sum(dim=1)
    keep = 1.0 if self.training else 1.0 - self.moe_token_dropout
    return mix_experts(
        hidden_states, weights * keep, self.num_experts, lambda index, states: self[f"expert_{index}"](states)
    )


def _switch_experts(
    self: nn.Module,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    # `selected_experts` is one-hot already, [tokens, 1, experts]; nothing where an expert was full.
    weights = selected_experts[:, 0].to(routing_weights.dtype) * routing_weights
    return mix_experts(hidden_states, weights, self.num_experts, lambda index, states: self[f"expert_{index}"](states))


def _step_experts(
    self: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        return F.linear(self._apply_gate(F.linear(states, self.gate_up_proj[index])), self.down_proj[index])

    return mix_experts(
        hidden_states, _weights_by_expert(top_k_index, top_k_weights, self.num_experts), self.num_experts, expert
    )


def _masked_by_slots(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    inputs_embeds: torch.Tensor | None = None,
    past_key_values: Any = None,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """A mask [batch, 1, length, slots] from the cache, which models take as it is."""
    if attention_mask is None and past_key_values is not None:
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        # Of embeddings the mask has the first two sizes, the dtype and the device.
        like = torch.empty(*tokens.shape[:2], 0, dtype=self.dtype, device=tokens.device)
        attention_mask = create_causal_mask(self.config, like, None, past_key_values)
    return original(
        self, input_ids, attention_mask, *args, inputs_embeds=inputs_embeds, past_key_values=past_key_values, **kwargs
    )


def _git_text(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    pixel_values: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if pixel_values is not None:
        return original(
            self, input_ids, attention_mask, position_ids, pixel_values, past_key_values, inputs_embeds, **kwargs
        )
    hidden_states = self.embeddings(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
    mask = create_causal_mask(
        self.config.get_text_config(), hidden_states, attention_mask, past_key_values, position_ids
    )
    return self.encoder(hidden_states, attention_mask=mask, past_key_values=past_key_values, **kwargs)


def _language_adapter(
    self: nn.Module,
    hidden_states: torch.Tensor,
    input_tensor: torch.Tensor,
    lang_ids: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    summed = self.dropout(self.dense(hidden_states)) + input_tensor
    normed = summed
    if self.adapter_layer_norm is not None:
        normed = self.adapter_layer_norm(summed)
    elif self.adapter_reuse_layer_norm:
        normed = self.LayerNorm(summed)
    adapted = torch.zeros_like(normed)
    for index, adapter in enumerate(self.adapter_modules.values()):
        adapted = torch.where((lang_ids == index).view(-1, 1, 1), adapter(normed), adapted)
    return self.dropout(adapted) + (normed if self.ln_before_adapter else summed)


def _mpt_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, query_length = hidden_states.shape[:2]
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        part.reshape(batch_size, query_length, self.n_heads, self.head_dim).transpose(1, 2)
        for part in mixed.chunk(3, dim=2)
    )
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    scores = torch.matmul(query, key.transpose(-1, -2)) * self.softmax_scale
    # One bias for every query, [heads, 1, slots]: relative to the last slot, which shifts a row of scores as a whole.
    scores = scores + position_bias[:, :, position_bias.shape[2] - key.shape[2] :]
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask, torch.finfo(query.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
    output = torch.matmul(weights, value).transpose(1, 2).reshape(batch_size, query_length, self.hidden_size)
    return self.out_proj(output), weights


#: Class -> replacement of its `forward`.
METHODS: dict[str, Callable] = {
    "MvpLearnedPositionalEmbedding": _positions,
    "TrOCRLearnedPositionalEmbedding": _positions,
    "RoFormerSinusoidalPositionalEmbedding": _positions,
    "DbrxExperts": _dbrx_experts,
    "LongcatFlashExperts": _longcat_experts,
    "NllbMoeExperts": _nllb_experts,
    "Step3p7Experts": _step_experts,
    "SwitchTransformersExperts": _switch_experts,
    "BigBirdModel": _masked_by_slots,
    "BioGptModel": _masked_by_slots,
    "MegatronBertModel": _masked_by_slots,
    "RemBertModel": _masked_by_slots,
    "RoFormerModel": _masked_by_slots,
    "GitModel": _git_text,
    "MptAttention": _mpt_attention,
    "XmodOutput": _language_adapter,
}
