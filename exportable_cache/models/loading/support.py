"""Models that are refused by name, and checks of the sizes that a config states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Models that leave no room for a cache of ours: what they do instead, and what upstream would have to change.
WITHOUT_CACHE = {
    "blip": (
        "it takes a picture at every step, which its text decoder attends to by cross-attention; upstream would have "
        "to keep those keys and values in an EncoderDecoderCache, as Whisper does"
    ),
    "blt": (
        "it cuts bytes into patches where a model of its own finds them surprising, so the shapes of a step depend "
        "on data; patches of a fixed length would have to be a choice upstream"
    ),
    "cpmant": (
        "tokens of one call see each other in both directions, and learned ones before the first see them all, so a "
        "prompt cannot come in pieces, and it takes every token at every step; upstream would have to take the new "
        "tokens alone, and a context that is causal"
    ),
    "idefics": (
        "it takes pictures at every step, which layers of cross-attention between the others attend to; upstream would "
        "have to keep their keys and values in the cache, as Mllama does"
    ),
    "reformer": (
        "it keeps hashed buckets and hidden states, ReformerDynamicCache, and sorts by bucket, so what a query sees "
        "depends on data; upstream would have to look at all keys through a mask of equal buckets"
    ),
    "udop": (
        "its encoder takes the place of every token on a page, `bbox`, beside the token, where a session's takes "
        "one input"
    ),
    "voxtral_realtime": (
        "it takes a piece of sound beside every token, where a session feeds one or the other; upstream would have to "
        "take the sum of both as embeddings"
    ),
    "xlnet": (
        "it keeps hidden states, the argument `mems`, and predicts from a dummy token behind those of a step, which "
        "sees them by `perm_mask`; the tokens themselves see later ones of their call. Upstream would have to keep "
        "keys and values in a cache, and give the stream of queries for the next position by itself"
    ),
}

#: Models whose configs do not say that their layers keep states: model type -> states of each layer.
STATES_OF_LAYERS = {"rwkv": 2, "xlstm": 3}

#: Layer types of DeepSeek V4 that keep what every token gives for compressed entries, as an indexer's keys.
COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")

#: Models that take no cache of transformers, and what their own state is called, as an argument and in an output; None
#: of one that takes every token at every step.
WITHOUT_DYNAMIC_CACHE = {
    "minimax": "past_key_values",
    "openai-gpt": None,
    "rwkv": "state",
    "xlm": None,
    "xlstm": "cache_params",
}

#: Models whose original is right where tokens come one by one, and another model where several come in one call, and
#: what that does. Over a cache of ours they are what they are token by token, however many come.
RIGHT_BY_TOKEN = {
    "fsmt": "tokens of one call see each other in both directions",
    "kyutai_speech_to_text": "tokens of one call see past the window",
    "moshi": "tokens of one call see past the window",
    "prophetnet": "position biases of the predicting stream are mixed up among the tokens of one call",
}

#: Encoders that are wrong in float16 where their input is padded, and why: a static one is padded to whole blocks.
WRONG_PADDED_IN_FLOAT16 = {
    "longt5": "its encoder adds -1e10 to scores of padding, which is minus infinity in float16 and gives not-a-number",
}

#: Config fields that make a model one that no static cache fits: field -> (model types, reason).
REFUSED_OPTIONS = {
    "alibi": (("falcon",), "its position bias is sized by the tokens seen, not by the cache's slots"),
    "use_bidirectional_attention": (
        ("gemma3", "gemma3_text"),
        "its tokens see later ones, so it does not generate step by step",
    ),
}

#: Config fields without which no static cache fits a model: field -> (model types, reason).
NEEDED_OPTIONS = {
    "causal": (
        ("xlm",),
        "its tokens see later ones, so it does not generate step by step",
    ),
}

#: Config fields that a cache of ours must not outgrow: field -> (model types, reason).
LONGEST = {
    "keep_window_size": (
        ("doge",),
        "past it its attention chooses among the keys by their values, which is not done here",
    )
}

#: Models whose position bias counts the cache's slots, so that a slot has to be its position: no sinks for them.
BIASED_BY_SLOT = ("bloom", "mpt")


#: The deepest that is built; published models have up to about 130.
MOST_LAYERS = 2048
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
).split()
_WIDTHS = (
    "hidden_size n_embd d_model vocab_size num_attention_heads n_head n_heads num_heads num_key_value_heads "
    "max_position_embeddings"
).split()


#: 0 stands for none given.
_OPTIONAL = ("head_dim",)


def check_sizes(config: PreTrainedConfig | Mapping[str, Any], source: str) -> None:
    """Refuse a config, or the fields of one, of sizes that no model has.

    Raises:
        InputError: If one is less than 1, or there are more layers than `MOST_LAYERS`.
    """
    for path, fields in _parts(config if isinstance(config, Mapping) else vars(config), ""):
        for name in (*_DEPTHS, *_WIDTHS, *_OPTIONAL):
            value = fields.get(name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value < (0 if name in _OPTIONAL else 1):
                raise InputError(
                    f"the config of {source!r} says {path}{name} = {value}; it must be at least 1: correct it"
                )
            if name in _DEPTHS and value > MOST_LAYERS:
                raise InputError(
                    f"the config of {source!r} says {path}{name} = {value}; at most {MOST_LAYERS} are taken: correct it"
                )


def _parts(fields: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields, and those of configs inside: a text decoder's, an encoder's."""
    yield path, fields
    for name, value in fields.items():
        if name.endswith("config") and (isinstance(value, Mapping) or hasattr(value, "model_type")):
            yield from _parts(value if isinstance(value, Mapping) else vars(value), f"{path}{name}.")
