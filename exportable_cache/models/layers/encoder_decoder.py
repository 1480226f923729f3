"""What each layer of an encoder-decoder keeps: read from the model, by running one token through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from ...cache.attention.implementation import attention_of
from ...cache.layout import CROSS_ATTENTION, LayerLayout
from ...errors import UnsupportedModelError
from .encoder import EncoderStates
from .layout import layer_types_and_windows, probe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .encoder import Encoder


@torch.no_grad()
def encoder_decoder_layers(
    model: PreTrainedModel, encoder: Encoder
) -> tuple[list[LayerLayout], torch.dtype, torch.device]:
    """Layouts of the self-attention layers, then of the cross-attention layers, and their dtype and device.

    Raises:
        UnsupportedModelError: If the model keeps them elsewhere than in a transformers `EncoderDecoderCache`.
    """
    kinds = layer_types_and_windows(model.config)
    half = len(kinds) // 2
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    length = encoder.capacity if encoder.is_fixed else 3
    states = EncoderStates.of(
        torch.zeros(1, length, encoder.hidden_size, dtype=getattr(torch, encoder.dtype), device=model.device)
    )
    was_training = model.training
    model.eval()
    try:
        token = probe_tokens(model)
        # Whatever it was switched to, as by an earlier cache: over transformers' own cache ours has no slots to mask.
        with attention_of(model, "eager"):
            model(decoder_input_ids=token, encoder_outputs=states, past_key_values=cache, use_cache=True)
    finally:
        model.train(was_training)
    layers: list[Any] = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    written = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    if len(written) != len(kinds):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote {len(written)} layers to its cache, {half} of self-attention and as many of "
            "cross-attention were expected; layers that keep their keys and values elsewhere are not supported"
        )
    layouts = [
        LayerLayout(
            layer_type,
            num_heads=layer.keys.shape[1],
            head_dim=layer.keys.shape[3],
            value_head_dim=layer.values.shape[3],
            window=window,
            encoder_slots=encoder.capacity if layer_type == CROSS_ATTENTION else None,
        )
        for (layer_type, window), layer in zip(kinds, layers, strict=True)
    ]
    return layouts, layers[0].keys.dtype, layers[0].keys.device
