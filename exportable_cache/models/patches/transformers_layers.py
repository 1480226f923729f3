"""Modules of transformers that are wrong over any static cache, or keep their state outside of every cache.

| module | models | why | upstream (v5.23.0, src/transformers/models) |
|---|---|---|---|
| `GPTNeoSelfAttention` | GPT-Neo | takes the newest key to be the last slot | gpt_neo/modeling_gpt_neo.py |
| `LEDDecoderAttention` | LED | masks nothing in a step of one token | led/modeling_led.py |
| `MiniMaxModel` | MiniMax | insists on a cache class of its own, MiniMaxCache | minimax/modeling_minimax.py |
| `MiniMaxLightningAttention` | MiniMax | keeps its state there, and loops over a step's tokens | minimax/modeling_minimax.py |
| `MoonshineStreamingDecoder` | Moonshine Streaming | adds positions to the encoder's states in place, at every step | moonshine_streaming/... |
| `RecurrentGemmaRecurrentBlock` | RecurrentGemma | keeps its states on the module, and convolves each prompt from nothing | recurrent_gemma/... |

A replacement acts only over a cache of ours, or one that is asked what a model keeps (`layout.ProbeCache`), and hands
everything else to the original. Each has a test that fails once the original is right (tests/patches/test_transformers_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from ...cache.attention.masks import position_mask
from ...cache.layers import CacheLayer
from ..scans import linear_recurrence, state_space_scan
from .marked import patch_forwards


def patch_layers(model: nn.Module) -> list[str]:
    """Replace `forward` of the modules of the table in the classes that this model is made of. Calling it again changes nothing.

    Returns:
        Names of the patched classes that the model has need of, sorted.
    """
    found = patch_forwards(model, LAYERS, _over_our_cache)
    if "RecurrentGemmaRecurrentBlock" in found:
        blocks = [module.temporal_block for module in model.modules() if hasattr(module, "temporal_block")]
        for index, block in enumerate(blocks):
            block.layer_idx = index  # upstream's attention blocks know it, the recurrent ones do not
    return sorted(found)


def _over_our_cache(replacement: Callable, original: Callable) -> Callable:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        if getattr(cache, "is_probe", False) or any(
            isinstance(layer, CacheLayer) for layer in getattr(cache, "layers", ())
        ):
            return replacement(self, *args, original=original, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _step_mask(layer: Any, hidden_states: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
    """Additive mask [batch, 1, q_length, kv_length] of a layer that is about to be updated; None of one that is no layer of ours.

    Args:
        hidden_states: [batch, q_length, hidden].
        window: Tokens that each sees, itself included; None for all.
    """
    if not isinstance(layer, CacheLayer):
        return None
    batch_size, q_length = hidden_states.shape[:2]
    kv_length, kv_offset = layer.get_mask_sizes(q_length)
    return position_mask(
        batch_size,
        q_length,
        kv_length,
        layer.cumulative_length[:, None],
        kv_offset,
        causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        dtype=hidden_states.dtype,
        device=hidden_states.device,
    )


def _gpt_neo_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layer_past: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local layers see `window_size` tokens by position; scores are not scaled, and computed in float32."""
    batch_size, length, _ = hidden_states.shape
    query, key, value = (
        projection(hidden_states).view(batch_size, length, self.num_heads, self.head_dim).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    layer = layer_past.layers[self.layer_id] if self.layer_id < len(layer_past.layers) else None
    mask = _step_mask(layer, hidden_states, self.config.window_size if self.attention_type == "local" else None)
    key, value = layer_past.update(key, value, self.layer_id)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
    # The model's own mask knows of padding, and not of windows.
    for addend in (mask, attention_mask):
        scores = scores if addend is None else scores + addend.float().clamp(min=torch.finfo(torch.float32).min / 4)
    weights = torch.softmax(scores, dim=-1).to(value.dtype)
    output = torch.matmul(weights, value).transpose(1, 2).reshape(batch_size, length, self.embed_dim)
    return self.out_proj(output), weights


def _led_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if key_value_states is None and attention_mask is None:
        layers = getattr(past_key_values, "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        attention_mask = _step_mask(layer, hidden_states)
    return original(
        self,
        hidden_states,
        key_value_states=key_value_states,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        **kwargs,
    )


def _with_states_of_its_own(
    self: nn.Module, *args: Any, encoder_hidden_states: torch.Tensor, original: Callable, **kwargs: Any
) -> Any:
    """A copy for the decoder to add to: what a session encoded serves many prompts."""
    return original(self, *args, encoder_hidden_states=encoder_hidden_states.clone(), **kwargs)


def _recurrent_block(
    self: nn.Module,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The block of Griffin (De et al. 2024, arXiv:2402.19427) with its convolution and recurrent states in the cache."""
    gate = self.act_fn(self.linear_y(input_states))
    branch = self.linear_x(input_states).transpose(1, 2)
    branch = past_key_values.update_conv_state(branch, self.layer_idx, conv_kernel_size=self.conv1d_width - 1)
    # A probe gives back no more than it was given; zeros before the first token are what no token is.
    branch = F.pad(branch, (self.conv1d_width - 1 + input_states.shape[1] - branch.shape[2], 0))
    branch = F.conv1d(branch, self.conv_1d.weight, self.conv_1d.bias, groups=self.lru_width).transpose(1, 2)
    initial = past_key_values.get_recurrent_state(self.layer_idx)
    if initial is None:
        initial = torch.zeros(branch.shape[0], self.lru_width, dtype=torch.float32, device=branch.device)
    decay, inputs = _gated(self.rg_lru, branch, position_ids)
    states = linear_recurrence(decay, inputs, initial)
    past_key_values.update_recurrent_state(states[:, -1], self.layer_idx)
    return self.linear_out(states.to(branch.dtype) * gate), None


def _gated(self: nn.Module, branch: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and inputs of the recurrence in float32, [batch, length, width]: section 2.4 of the paper.

    A first token starts anew: it decays what came before to nothing, and is not scaled.
    """
    batch_size, length, width = branch.shape
    heads = branch.reshape(batch_size * length, self.num_attention_heads, self.block_width).transpose(0, 1)
    input_gate, recurrent_gate = (
        torch.sigmoid(torch.baddbmm(bias[:, None], heads, weight)).transpose(0, 1).reshape(batch_size, length, width)
        for weight, bias in (
            (self.input_gate_weight, self.input_gate_bias),
            (self.recurrent_gate_weight, self.recurrent_gate_bias),
        )
    )
    log_decay = -8.0 * recurrent_gate * F.softplus(self.recurrent_param)
    is_first = (position_ids == 0)[..., None]
    scale = torch.where(is_first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    decay = torch.where(is_first, 0.0, torch.exp(log_decay))
    return decay.float(), (branch * input_gate * scale.to(branch.dtype)).float()


def _without_its_check(self: nn.Module, *args: Any, original: Callable, **kwargs: Any) -> Any:
    """Only with `use_cache` does the model look at the class of its cache; its layers use what they are given."""
    return original(self, *args, **{**kwargs, "use_cache": False})


def _lightning_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h[t] = exp(-slope) h[t-1] + k[t] v[t]`, `y[t] = q[t] h[t]` per head (MiniMax-01, arXiv:2501.08313, section 2.2)."""
    batch_size, length, _ = hidden_states.shape
    mixed = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = mixed * attention_mask[:, :, None].to(mixed.dtype)
    query, key, value = mixed.reshape(batch_size, length, self.num_attention_heads, 3 * self.head_dim).chunk(3, dim=-1)
    state = past_key_values.get_recurrent_state(self.layer_idx)
    if state is None:
        state = value.new_zeros(batch_size, self.num_attention_heads, self.head_dim, self.head_dim)
    steps = torch.ones(batch_size, length, self.num_attention_heads, dtype=torch.float32, device=value.device)
    output, state = state_space_scan(value, steps, -self.slope_rate.flatten().float(), key, query, state.float())
    past_key_values.update_recurrent_state(state.to(value.dtype), self.layer_idx)
    output = self.norm(output.to(value.dtype).reshape(batch_size, length, self.num_attention_heads * self.head_dim))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), state


#: Class -> replacement of its `forward`.
LAYERS: dict[str, Callable] = {
    "GPTNeoSelfAttention": _gpt_neo_attention,
    "LEDDecoderAttention": _led_attention,
    "MiniMaxModel": _without_its_check,
    "MiniMaxLightningAttention": _lightning_attention,
    "MoonshineStreamingDecoder": _with_states_of_its_own,
    "RecurrentGemmaRecurrentBlock": _recurrent_block,
}
