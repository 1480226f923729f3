"""LED: its decoder has no mask in steps of one token, but a static cache also has empty slots.

When traced, its encoder runs in blocks of half a window for a symbolic length, and its position table is indexed by
that length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from ....common.patch import Patch
from ..conditions import CACHE, only_traced, over_our_cache, step_mask

if TYPE_CHECKING:
    from torch import nn
    from transformers.models.led.modeling_led import LEDDecoderAttention, LEDEncoder, LEDEncoderSelfAttention


def _led_attention(
    self: LEDDecoderAttention,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if key_value_states is None and attention_mask is None:
        layers = getattr(cache, "layers", ())
        index: Any = self.layer_idx  # upstream annotates it as a bool
        layer = layers[index] if index < len(layers) else None
        attention_mask = step_mask(layer, hidden_states)
    return original(
        self,
        hidden_states,
        key_value_states=key_value_states,
        **{CACHE: cache},
        attention_mask=attention_mask,
        **kwargs,
    )


def _positions(
    self: nn.Embedding,
    input_ids_shape: torch.Size,
    cache_length: int | torch.Tensor = 0,
    *,
    original: Callable,
) -> torch.Tensor:
    at = torch.arange(input_ids_shape[1], device=self.weight.device) + cache_length
    return F.embedding(at, self.weight)


def _encoder(
    self: LEDEncoder,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    global_attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    *args: Any,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Run the encoder without global attention: half a window on each side (Beltagy et al. 2020, arXiv:2004.05150)."""
    if global_attention_mask is not None:
        return original(self, input_ids, attention_mask, global_attention_mask, inputs_embeds, *args, **kwargs)
    hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    if attention_mask is None:
        attention_mask = torch.ones(hidden_states.shape[:2], dtype=torch.int64, device=hidden_states.device)
    is_real = attention_mask > 0
    hidden_states = self.layernorm_embedding(hidden_states + self.embed_positions(hidden_states.shape[:2]))
    layers: Any = self.layers
    for layer in layers:
        attended = _local_attention(layer.self_attn.longformer_self_attn, hidden_states, is_real)
        hidden_states = layer.self_attn_layer_norm(hidden_states + layer.self_attn.output(attended))
        widened = layer.activation_fn(layer.fc1(hidden_states))
        hidden_states = layer.final_layer_norm(hidden_states + layer.fc2(widened))
    return BaseModelOutput(last_hidden_state=hidden_states)


def _local_attention(self: LEDEncoderSelfAttention, hidden_states: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Attend in blocks of half a window, each to itself and its two neighbours.

    `is_real`, bool [batch, length], is False on padding. Rows are indexed instead of sliced, because slices would make
    a tracer branch on the length.
    """
    reach, length = self.one_sided_attn_window_size, hidden_states.shape[1]
    # One more than needed, because tracers specialise on a size of 1.
    blocks = length // reach + 2
    # [batch, heads, length, dim]
    query, key, value = (
        linear(hidden_states).reshape(*hidden_states.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        for linear in (self.query, self.key, self.value)
    )
    within = torch.arange(3 * reach, device=query.device) - reach
    token = torch.arange(blocks, device=query.device)[:, None] * reach + within[None, reach : 2 * reach]
    other = torch.arange(blocks, device=query.device)[:, None] * reach + within
    query, key, value = (
        one[:, :, at.clamp(0, length - 1)] for one, at in ((query, token), (key, other), (value, other))
    )
    is_key = is_real[:, other.clamp(0, length - 1)] & (other >= 0) & (other < length)
    seen = is_key[:, :, None] & ((token[:, :, None] - other[:, None]).abs() <= reach)
    # In float32, because the lowest value plus a score is infinite in float16, and padding may see nothing else.
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]
    scores = torch.matmul(query / self.head_dim**0.5, key.transpose(-1, -2)).float() + mask
    output = torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), value)
    at = torch.arange(length, device=query.device)
    output = output[:, :, at // reach, at % reach].transpose(1, 2)
    return output.reshape(hidden_states.shape) * is_real[:, :, None].to(output.dtype)


PATCHES = {
    "led": (
        Patch(
            "led.modeling_led",
            "LEDDecoderAttention.forward",
            over_our_cache(_led_attention),
            "it has no mask in steps of one token",
            digests=("f50557b77079226f", "fb36ee6b91dc746b"),
        ),
        Patch(
            "led.modeling_led",
            "LEDLearnedPositionalEmbedding.forward",
            only_traced(_positions),
            "the number of positions that it looks up depends on data",
            digests=("6c7aea9039be88b9", "8db5aba37ddad783"),
        ),
        Patch(
            "led.modeling_led",
            "LEDEncoder.forward",
            only_traced(_encoder),
            "it searches for tokens of global attention, and pads to whole windows",
            digests=("2978e41d817c7e47", "43066e8519f63240"),
            source="LEDEncoder LEDEncoderLayer LEDEncoderAttention LEDEncoderSelfAttention",
        ),
    )
}
