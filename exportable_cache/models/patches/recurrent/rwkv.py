"""RWKV: it keeps its states in a list, the argument `state`, and loops over the tokens of a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ...scans import weighted_values
from ..conditions import kept_hidden_states, over_our_cache

# Indices of the token shifts in the cache: inputs of the last token, like a convolution of two tokens.
_ATTENTION, _FEED_FORWARD = 0, 1


def _rwkv(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    cache: Any,
    original: Callable,
    logits_to_keep: int | torch.Tensor = 0,
    **kwargs: Any,
) -> Any:
    """Run RWKV-4 (arXiv:2305.13048); each layer keeps two token shifts and the sums of its weighted mean."""
    model = self.rwkv
    hidden_states = model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    rescale_every = self.config.rescale_every if model.layers_are_rescaled else 0
    for index, block in enumerate(model.blocks):
        if index == 0:
            hidden_states = block.pre_ln(hidden_states)
        hidden_states = hidden_states + _time_mixing(block.attention, block.ln1(hidden_states), cache)
        hidden_states = hidden_states + _channel_mixing(block.feed_forward, block.ln2(hidden_states), cache)
        if rescale_every > 0 and (index + 1) % rescale_every == 0:
            hidden_states = hidden_states / 2
    logits = self.head(kept_hidden_states(model.ln_out(hidden_states), logits_to_keep))
    return sys.modules[type(self).__module__].RwkvCausalLMOutput(logits=logits)


def _time_mixing(self: Any, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
    before = _before(hidden_states, cache, self.layer_id, _ATTENTION)
    key, value, receptance = (
        linear(hidden_states * mix + before * (1 - mix))
        for linear, mix in (
            (self.key, self.time_mix_key),
            (self.value, self.time_mix_value),
            (self.receptance, self.time_mix_receptance),
        )
    )
    state = cache.get_recurrent_state(self.layer_id)
    if state is None:
        state = torch.zeros(key.shape[0], 3, key.shape[2], dtype=torch.float32, device=key.device)
    mean, state = weighted_values(-torch.exp(self.time_decay.float()), self.time_first.float(), key, value, state)
    cache.update_recurrent_state(state, self.layer_id)
    return self.output(torch.sigmoid(receptance) * mean.to(key.dtype))


def _channel_mixing(self: Any, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
    before = _before(hidden_states, cache, self.layer_id, _FEED_FORWARD)
    key = self.key(hidden_states * self.time_mix_key + before * (1 - self.time_mix_key))
    receptance = self.receptance(hidden_states * self.time_mix_receptance + before * (1 - self.time_mix_receptance))
    return torch.sigmoid(receptance) * self.value(torch.square(torch.relu(key)))


def _before(hidden_states: torch.Tensor, cache: Any, layer: int, shift: int) -> torch.Tensor:
    """Return the previous token of each token, [batch, length, hidden]; zeros before the first."""
    length = hidden_states.shape[1]
    joined = cache.update_conv_state(hidden_states.transpose(1, 2), layer, shift, conv_kernel_size=1)
    # Padded, because a probe cache returns only the new tokens.
    return F.pad(joined, (1 + length - joined.shape[2], 0)).narrow(2, 0, length).transpose(1, 2)


def _rescaled(model: Any) -> None:
    """Rescale weights before tracing or quantisation, as upstream does in the first step in eval mode."""
    for module in model.modules():
        if hasattr(module, "layers_are_rescaled") and module.training == module.layers_are_rescaled:
            module._rescale_layers()


PATCHES = {
    "rwkv": (
        Patch(
            "rwkv.modeling_rwkv",
            "RwkvForCausalLM.forward",
            over_our_cache(_rwkv),
            "it keeps its states in a list",
            digests=("fe044712abf5c350", "bfd050a400eb19a6", "44d129fdc00ebc04"),
            source=(
                "RwkvForCausalLM RwkvModel RwkvBlock RwkvFeedForward RwkvSelfAttention rwkv_linear_attention "
                "rwkv_linear_attention_cpu"
            ),
        ),
    )
}
PREPARATIONS = {"rwkv": ("", _rescaled)}
