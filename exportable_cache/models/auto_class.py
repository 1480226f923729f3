"""Which of transformers' auto classes makes the generating model of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Model types that are loaded whole where transformers has their text decoder by itself, too; others as that.
MULTIMODAL = ("llava", "smolvlm", "idefics3", "voxtral", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def auto_class(config: PreTrainedConfig) -> type | None:
    """The auto class that loads the generating model of a config, None where there is none."""
    kind = type(config)
    if getattr(config, "is_encoder_decoder", False):
        hears: Any = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING.get(kind, None)
        # Seamless has a model of text and one of speech for one kind of config.
        is_named = hears is not None and hears.__name__ in (config.architectures or ())
        if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and not is_named:
            return AutoModelForSeq2SeqLM
        if hears is not None:
            return AutoModelForSpeechSeq2Seq
    elif config.model_type in MULTIMODAL:
        return AutoModelForMultimodalLM
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
            return AutoModelForMultimodalLM
        # A text decoder that hears is no encoder-decoder, but some are listed as such.
        return AutoModelForSeq2SeqLM if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING else None
    return AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None
