"""ProphetNet: its attention computes its position bias, and assumes one token per step after the prompt."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import EncoderDecoderCache
from transformers.masking_utils import create_causal_mask

from ....common.patch import Patch
from ..conditions import CACHE, over_our_cache


class _Bias(NamedTuple):
    """Position buckets and mask of all streams and layers in a step.

    Attributes:
        buckets: Buckets of the distances to each slot and, last, to the stream's own key: int64, broadcastable to
            [batch, heads, streams, length, slots + 1].
        mask: Additive, [batch, 1, streams, length, slots + 1].
    """

    buckets: torch.Tensor
    mask: torch.Tensor


def _decoder(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    """Run the decoder (Qi et al. 2020, arXiv:2001.04063): a main stream, and streams that predict later tokens.

    A predicting stream sees the keys of the main stream and, at each position, its own key there.
    """
    module = sys.modules[type(self).__module__]
    embeds = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    length = embeds.shape[1]
    has_encoder = isinstance(cache, EncoderDecoderCache)
    own = cache.self_attention_cache if has_encoder else cache
    # A probe cache has no tokens yet.
    start = 0 if getattr(own, "is_probe", False) else own.get_query_offset()
    positions = (torch.arange(length, device=embeds.device) + start).reshape(-1, length)
    table = self.position_embeddings
    first = positions + 1 + table.padding_idx
    placed, predicted = (table._forward((first + ahead).clamp(max=table.max_length - 1)) for ahead in (0, 1))
    streams = [embeds + placed]
    # The first predicting stream has the last of these embeddings, as upstream.
    ngrams = self.ngram_embeddings.weight.roll(1, 0)
    streams += [(one + predicted).expand_as(embeds) for one in ngrams.unbind(0)]
    hidden_states = torch.cat(streams, dim=1)
    if self.embeddings_layer_norm:
        hidden_states = self.embeddings_layer_norm(hidden_states)
    bias = _bias(self, embeds, own, positions, create_causal_mask(self.config, embeds, attention_mask, own))
    encoder_mask = None
    if encoder_attention_mask is not None:
        encoder_mask = (1.0 - encoder_attention_mask[:, None, None, :].to(embeds.dtype)) * torch.finfo(embeds.dtype).min
        encoder_mask = encoder_mask.expand(-1, self.config.num_decoder_attention_heads, -1, -1)
    for layer in self.layers:
        attended = _attention(layer.self_attn, hidden_states, own, bias)
        hidden_states = layer.self_attn_layer_norm(hidden_states + attended)
        if encoder_hidden_states is not None:
            attended, _ = layer.cross_attn(
                hidden_states=hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_mask,
                **{CACHE: cache},
            )
            hidden_states = layer.cross_attn_layer_norm(attended + hidden_states)
        hidden_states = layer.feed_forward_layer_norm(layer.feed_forward(hidden_states) + hidden_states)
    return module.ProphetNetDecoderModelOutput(
        last_hidden_state=hidden_states.narrow(1, 0, length),
        last_hidden_state_ngram=hidden_states.narrow(1, length, self.ngram * length),
        **{CACHE: cache},
    )


def _bias(self: Any, embeds: torch.Tensor, cache: Any, positions: torch.Tensor, mask: Any) -> _Bias:
    """Args: mask: Causal, additive, [batch, 1, length, slots]."""
    slots, offset = cache.get_mask_sizes(positions.shape[1], 0)
    keys = torch.arange(slots, device=embeds.device) + offset
    keys = keys if keys.dim() == 3 else keys.reshape(-1, 1, slots)
    # [batch, length, slots]
    distance = positions[:, :, None] - keys
    own = torch.zeros_like(distance.narrow(-1, 0, 1))
    lowest = torch.finfo(embeds.dtype).min
    if mask is None:
        mask = embeds.new_zeros(1, 1, *distance.shape[1:])
    buckets, masks = [], []
    for stream in range(1 + self.ngram):
        # A predicting stream is one position later, and does not see the tokens that it predicts, except the first key.
        ahead = 0 if stream == 0 else 1
        relative = torch.cat([-(distance + ahead), own], dim=-1)
        buckets.append(_buckets(relative, self.num_buckets, self.relative_max_distance))
        seen = mask
        if stream > 1:
            seen = torch.where(((distance >= stream - 1) | (keys == 0))[:, None], mask, lowest)
        alone = torch.full_like(seen.narrow(-1, 0, 1), lowest if stream == 0 else 0.0)
        masks.append(torch.cat([seen, alone], dim=-1))
    return _Bias(torch.stack(buckets, dim=1)[:, None], torch.stack(masks, dim=2))


def _buckets(relative: torch.Tensor, count: int, most: int) -> torch.Tensor:
    """Return the buckets of `relative` positions, int64 of any shape, as upstream's `compute_relative_buckets`.

    Distances are clamped, because upstream also takes logarithms of 0, which it does not use.
    """
    exact = count // 2
    distance = (-relative).clamp(min=0)
    logarithm = torch.log(distance.clamp(min=exact).float() / exact) / math.log(most / exact)
    far = (exact + logarithm * (count - exact)).clamp(max=count - 1).long()
    return torch.where(distance < exact, distance, far)


def _attention(self: Any, hidden_states: torch.Tensor, cache: Any, bias: _Bias) -> torch.Tensor:
    batch_size, streams = hidden_states.shape[0], 1 + self.ngram
    # [batch, heads, streams, length, dim]
    query, key, value = (
        linear(hidden_states)
        .reshape(batch_size, streams, -1, self.num_attn_heads, self.head_dim)
        .permute(0, 3, 1, 2, 4)
        for linear in (self.query_proj, self.key_proj, self.value_proj)
    )
    query = query / self.head_dim**0.5
    keys, values = cache.update(key[:, :, 0].contiguous(), value[:, :, 0].contiguous(), self.layer_idx)
    scores = torch.matmul(query, keys[:, :, None].transpose(-1, -2))
    scores = torch.cat([scores, (query * key).sum(-1, keepdim=True)], dim=-1)
    # [batch, heads, streams, length, buckets]
    relative = self.relative_pos_embeddings(hidden_states)
    relative = relative.reshape(batch_size, streams, -1, self.num_buckets, self.num_attn_heads).permute(0, 4, 1, 2, 3)
    scores = scores + torch.gather(relative.contiguous(), -1, bias.buckets.expand(scores.shape).contiguous())
    weights = torch.softmax((scores + bias.mask).float(), dim=-1).to(scores.dtype)
    slots = keys.shape[2]
    output = torch.matmul(weights.narrow(-1, 0, slots), values[:, :, None]) + weights.narrow(-1, slots, 1) * value
    output = output.permute(0, 2, 3, 1, 4).reshape(hidden_states.shape)
    return self.out_proj(output)


PATCHES = {
    "prophetnet": (
        Patch(
            "prophetnet.modeling_prophetnet",
            "ProphetNetDecoder.forward",
            over_our_cache(_decoder),
            "the size of its position bias is not that of the slots",
            digests=("693ad757c0a7c4ac", "2f3686cbad7621ca"),
            source="ProphetNetDecoder ProphetNetDecoderLayer ProphetNetNgramSelfAttention ngram_attention_bias",
        ),
    )
}
