"""FSMT: it makes a causal mask only in training, and its position table grows with the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ....common.patch import Patch
from ..conditions import CACHE, over_our_cache, step_mask


def _decoder(
    self: Any,
    input_ids: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    encoder_padding_mask: torch.Tensor | None,
    decoder_padding_mask: torch.Tensor | None,
    *args: Any,
    cache: Any,
    original: Callable,
    **kwargs: Any,
) -> BaseModelOutputWithPastAndCrossAttentions:
    """Count positions from the padding index + 1; a padding token has the position of the token before it."""
    start = cache.cumulative_length[:, None]
    at = torch.arange(input_ids.shape[1], device=input_ids.device) + start
    positions = at + self.padding_idx + (input_ids != self.padding_idx).to(at.dtype)
    table = self.embed_positions
    hidden_states = self.embed_tokens(input_ids) * self.embed_scale + F.embedding(positions, table.weight)
    causal_mask = step_mask(cache.layers[0], hidden_states)
    hidden_states = hidden_states.transpose(0, 1)
    for layer in self.layers:
        hidden_states, _, _ = layer(
            hidden_states,
            encoder_hidden_states.transpose(0, 1),
            encoder_attn_mask=None if encoder_padding_mask is None else encoder_padding_mask.eq(0),
            layer_state=cache,
            causal_mask=causal_mask,
        )
    return BaseModelOutputWithPastAndCrossAttentions(
        last_hidden_state=self.output_projection(hidden_states.transpose(0, 1)), **{CACHE: cache}
    )


PATCHES = {
    "fsmt": (
        Patch(
            "fsmt.modeling_fsmt",
            "FSMTDecoder.forward",
            over_our_cache(_decoder),
            "it makes a causal mask only in training, and its position table grows with the sequence",
            digests=("44db535ee5e23053", "7fddf6b8d73d8751", "136cd430912f8d5e"),
            source="FSMTDecoder DecoderLayer Attention SinusoidalPositionalEmbedding",
        ),
    )
}
