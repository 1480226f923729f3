"""Decode in the style of gpt-fast (github.com/meta-pytorch/gpt-fast), for comparison.

It is a Llama in plain torch: query, key and value projections in one product, a static cache read whole under a mask,
compiled as one graph. It uses the weights of a transformers Llama, so that its logits can be compared with that model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module, config, batch_size: int, length: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.eps = config.rms_norm_eps
        self.qkv = nn.Parameter(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        self.out = attention.o_proj.weight
        self.gate, self.up, self.down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        self.norms = nn.ParameterList([layer.input_layernorm.weight, layer.post_attention_layernorm.weight])
        for name in ("keys", "values"):
            self.register_buffer(name, self.qkv.new_zeros(batch_size, self.sizes[1], length, self.sizes[2]))

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ):
        heads, kv_heads, dim = self.sizes
        batch = x.shape[0]
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[0], self.eps), self.qkv)
        query, key, value = qkv.view(batch, 1, -1, dim).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        self.keys[:, :, position] = key
        self.values[:, :, position] = value
        attended = F.scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=mask, enable_gqa=heads != kv_heads
        )
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, 1, -1), self.out)
        hidden = F.rms_norm(x, x.shape[-1:], self.norms[1], self.eps)
        return x + F.linear(F.silu(F.linear(hidden, self.gate)) * F.linear(hidden, self.up), self.down)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GptFastLlama(nn.Module):
    """A decode step: tokens int64 [batch, 1] at one position int64 [1] -> logits [batch, vocab]."""

    def __init__(self, model: LlamaForCausalLM, batch_size: int, length: int) -> None:
        super().__init__()
        self.embedding, self.head = model.model.embed_tokens.weight, model.lm_head.weight
        self.norm, self.eps = model.model.norm.weight, model.config.rms_norm_eps
        self.layers = nn.ModuleList(_Layer(layer, model.config, batch_size, length) for layer in model.model.layers)
        device = self.embedding.device
        cos, sin = model.model.rotary_emb(self.embedding[:1], torch.arange(length, device=device)[None])
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool, device=device).tril())

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.embedding)
        mask, cos, sin = self.causal[None, None, position], self.cos[position], self.sin[position]
        for layer in self.layers:
            x = layer(x, position, mask, cos, sin)
        return F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.eps), self.head)[:, -1]
