"""Models that are refused by name, and why: what each does that no cache of ours fits."""

from __future__ import annotations

#: Models that leave no room for a cache of ours, and what they do instead.
WITHOUT_CACHE = {
    "blip": "it takes a picture at every step, which its text decoder attends to by cross-attention",
    "blt": (
        "it cuts bytes into patches where a model of its own finds them surprising, so the shapes of a step depend "
        "on data"
    ),
    "cpmant": "it takes every token at every step, and computes its position bias from them",
    "idefics": "it takes pictures at every step, which layers of cross-attention between the others attend to",
    "musicgen": "it takes a token of each codebook at every step, where a session feeds one",
    "musicgen_decoder": "it takes a token of each codebook at every step, where a session feeds one",
    "musicgen_melody": "it takes a token of each codebook at every step, where a session feeds one",
    "musicgen_melody_decoder": "it takes a token of each codebook at every step, where a session feeds one",
    "reformer": "it keeps hashed buckets and hidden states, ReformerDynamicCache",
    "dia": "it takes a token of each codebook at every step, where a session feeds one",
    "kyutai_speech_to_text": "it takes a token of each codebook at every step, where a session feeds one",
    "udop": (
        "its encoder takes the place of every token on a page, `bbox`, beside the token, where a session's takes "
        "one input"
    ),
    "voxtral_realtime": "it takes a piece of sound beside every token",
    "xlnet": "it keeps hidden states, the argument `mems`, and takes a dummy token with each step",
}

#: Models whose configs do not say that their layers keep states: model type -> states of each layer.
STATES_OF_LAYERS = {"rwkv": 2, "xlstm": 3}

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
    "moshi": "tokens of one call see past the window",
    "prophetnet": "position biases of the predicting stream are mixed up among the tokens of one call",
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
