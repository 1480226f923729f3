"""Models that are not supported or need special treatment: tables, checks of the sizes in a config, and BLIP."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


#: Models that cannot use a static cache: what they do instead, and what would have to change upstream.
WITHOUT_CACHE = {
    "blip": (
        "its class takes neither an encoder's output nor a cache; load it by its name or folder, or convert it with "
        "models.loading.support.encoder_decoder_of"
    ),
    "blt": (
        "it splits bytes into patches by the entropy that a second model predicts, so the shapes of a step depend on "
        "data; upstream would have to offer patches of a fixed length"
    ),
    "cpmant": (
        "tokens of one call attend to each other in both directions, so a prompt cannot be split into chunks, and it "
        "takes every token at every step; upstream would have to take only the new tokens, with a causal context"
    ),
    "idefics": (
        "its cross-attention layers take the images at every step; upstream would have to keep their keys and values "
        "in the cache, as Mllama does"
    ),
    "reformer": (
        "its ReformerDynamicCache keeps hashed buckets and hidden states, and sorting by bucket makes the keys that a "
        "query sees depend on data; upstream would have to attend to all keys through a mask of equal buckets"
    ),
    "udop": (
        "its encoder needs the bounding box of every token, `bbox`, in addition to the token, and a session's encoder "
        "takes one input"
    ),
    "voxtral_realtime": (
        "it takes audio together with every token, and a session feeds one or the other; upstream would have to take "
        "the sum of both as embeddings"
    ),
    "xlnet": (
        "it keeps hidden states in `mems` and predicts from a dummy token after those of a step, by `perm_mask`, and "
        "tokens see later ones of their call; upstream would have to keep keys and values in a cache, and compute the "
        "query stream of the next position separately"
    ),
}

#: Models whose configs do not say that their layers keep states: model type -> number of states per layer.
STATES_OF_LAYERS = {"rwkv": 2, "xlstm": 3}

#: Layer types of DeepSeek V4 whose compressor inputs are kept for every token, like an indexer's keys.
COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")

#: Models that do not take a transformers cache -> the name of their state, as argument and output: "cache" for that of
#: `cache_argument`, None for a model that takes every token at every step.
WITHOUT_DYNAMIC_CACHE = {
    "minimax": "cache",
    "openai-gpt": None,
    "rwkv": "state",
    "xlm": None,
    "xlstm": "cache",
}

#: Models whose original results are right only if tokens are fed one by one: model type -> what several tokens per call
#: change. Over our caches their results do not depend on the number of tokens per call.
RIGHT_BY_TOKEN = {
    "fsmt": "tokens of one call see each other in both directions",
    "kyutai_speech_to_text": "tokens of one call see past the window",
    "moshi": "tokens of one call see past the window",
    "prophetnet": "position biases of the predicting stream are mixed up among the tokens of one call",
}

#: Encoders whose results are wrong in float16 if the input is padded, and why. Static encoders pad to whole blocks.
WRONG_PADDED_IN_FLOAT16 = {
    "longt5": "its encoder adds -1e10 to scores of padding, which is minus infinity in float16 and gives NaN",
}

#: Config fields with which a model cannot use a static cache: field -> (model types, reason).
REFUSED_OPTIONS = {
    "alibi": (("falcon",), "its position bias is sized by the tokens seen, not by the cache's slots"),
    "use_bidirectional_attention": (
        ("gemma3", "gemma3_text"),
        "its tokens see later ones, so it does not generate step by step",
    ),
}

#: Config fields without which a model cannot use a static cache: field -> (model types, reason).
NEEDED_OPTIONS = {
    "causal": (
        ("xlm",),
        "its tokens see later ones, so it does not generate step by step",
    ),
}

#: Models whose position bias counts slots, so each slot must be its position. They cannot have attention sinks.
BIASED_BY_SLOT = ("bloom", "mpt")


#: Most layers of a config that is accepted; published models have up to about 130.
MOST_LAYERS = 2048
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
).split()
_WIDTHS = (
    "hidden_size n_embd d_model vocab_size num_attention_heads n_head n_heads num_heads num_key_value_heads "
    "max_position_embeddings"
).split()


#: Fields in which 0 means that the value is not given.
_OPTIONAL = ("head_dim",)


def check_sizes(config: PreTrainedConfig | Mapping[str, Any], source: str) -> None:
    """Check that the sizes in a config, or in the fields of one, are possible.

    Raises:
        InputError: If a size is less than 1, or there are more than `MOST_LAYERS` layers.
    """
    for path, fields in _parts(config if isinstance(config, Mapping) else vars(config), ""):
        for name in (*_DEPTHS, *_WIDTHS, *_OPTIONAL):
            value = fields.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value < (0 if name in _OPTIONAL else 1):
                raise InputError(
                    f"{path}{name} in the config of {source!r} must be at least 1, got {value}; correct it"
                )
            if name in _DEPTHS and value > MOST_LAYERS:
                raise InputError(
                    f"{path}{name} in the config of {source!r} must be at most {MOST_LAYERS}, got {value}; correct it"
                )


def _parts(fields: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the fields of a config and of the configs inside it, each with its path."""
    yield path, fields
    for name, value in fields.items():
        if name.endswith("config") and (isinstance(value, Mapping) or hasattr(value, "model_type")):
            yield from _parts(value if isinstance(value, Mapping) else vars(value), f"{path}{name}.")


def encoder_decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return BLIP's captioning model as a `VisionEncoderDecoderModel` with the same weights; other models unchanged.

    BLIP's own class takes neither an encoder's output nor a cache. This one computes the same logits from its vision
    model and its text decoder, and keeps the keys and values of the image in an `EncoderDecoderCache`.
    """
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
