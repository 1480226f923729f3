"""BLIP as an encoder-decoder of images, because its own class takes neither an encoder's output nor a cache.

Its parts do: transformers' `VisionEncoderDecoderModel` of its vision model and its text decoder computes the same
logits, and keeps the keys and values of the image in an `EncoderDecoderCache`. Classes are imported where they are
used, because this module is imported with every model.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def encoder_decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return BLIP's captioning model as a `VisionEncoderDecoderModel` with the same weights; other models unchanged."""
    if type(model).__name__ != "BlipForConditionalGeneration":
        return model
    from transformers import GenerationConfig, VisionEncoderDecoderModel

    blip: Any = model
    config, text = encoder_decoder_config(blip.config), blip.config.text_config
    # The parts get the configs that the whole would warn about and give them.
    blip.vision_model.config, blip.text_decoder.config = config.encoder, config.decoder
    made = VisionEncoderDecoderModel(config, encoder=blip.vision_model, decoder=blip.text_decoder)
    made.generation_config = GenerationConfig(
        decoder_start_token_id=text.bos_token_id, eos_token_id=text.sep_token_id, pad_token_id=text.pad_token_id
    )
    return made.train(model.training)


def encoder_decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of `encoder_decoder_of`; those of other models unchanged."""
    if config.model_type != "blip":
        return config
    from transformers import VisionEncoderDecoderConfig

    encoder, decoder = copy.deepcopy(config.vision_config), copy.deepcopy(config.text_config)
    # Cross-attention has the width of the encoder, so that no projection is between them.
    decoder.cross_attention_hidden_size = encoder.hidden_size
    decoder.is_decoder = decoder.add_cross_attention = True
    made = VisionEncoderDecoderConfig(encoder=encoder, decoder=decoder)
    made.pad_token_id, made.dtype = decoder.pad_token_id, config.dtype
    return made


def original_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return BLIP's own config for one from `encoder_decoder_config`; None for others."""
    if getattr(getattr(config, "decoder", None), "model_type", None) != "blip_text_model":
        return None
    from transformers import BlipConfig

    return BlipConfig(text_config=config.decoder.to_dict(), vision_config=config.encoder.to_dict())
