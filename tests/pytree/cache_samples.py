"""One sample of every cache and layer of the installed transformers, made and fed the same way in every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, MambaConfig, MistralConfig, cache_utils

from exportable_cache.pytree import cache_classes

BATCH, HEADS, DIM, LAYERS = 3, 2, 4, 2
CAPACITY, WINDOW = 12, 4
SIZES = {
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
LIST_BASED = not hasattr(cache_utils, "DynamicLayer")
HAS_STATES = hasattr(cache_utils, "LinearAttentionLayer")


@dataclass(frozen=True)
class Sample:
    """A kind of cache or layer: how to make an empty one, and how to run `tokens` new tokens through it."""

    name: str
    make: Callable[[], Any]
    feed: Callable[[Any, int, int], Any]  # (object, tokens seen before, new tokens) -> what `update` returned

    def fed(self, *steps: int) -> Any:
        made, seen = self.make(), 0
        for tokens in steps:
            self.feed(made, seen, tokens)
            seen += tokens
        return made


def states(seen: int, tokens: int, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that depend on the positions only, so two objects can be fed alike."""
    generator = torch.Generator().manual_seed(1000 * seen + 10 * tokens + salt)
    shape = (BATCH, HEADS, tokens, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def feed_cache(cache: Any, seen: int, tokens: int) -> Any:
    kwargs = {"cache_position": torch.arange(seen, seen + tokens)}
    return [cache.update(*states(seen, tokens, layer), layer, kwargs) for layer in range(LAYERS)]


def feed_encoder_decoder(cache: Any, seen: int, tokens: int) -> Any:
    results = feed_cache(cache.self_attention_cache, seen, tokens)
    for layer in range(LAYERS):
        if not cache.is_updated.get(layer):
            cache.cross_attention_cache.update(*states(0, CAPACITY, layer), layer)
            cache.is_updated[layer] = True
    return results


def feed_mamba(cache: Any, seen: int, tokens: int) -> Any:
    results = []
    for layer in range(LAYERS):
        for position in range(seen, seen + tokens):
            new = states(position, 1, layer)[0].sum()
            conv = torch.full((BATCH, cache.intermediate_size), float(new))
            cache.update_ssm_state(layer, cache.ssm_states[layer] * 0.5 + new)
            results.append(cache.update_conv_state(layer, conv[..., None], torch.tensor([position])).clone())
    return results


def feed_layer(layer: Any, seen: int, tokens: int) -> Any:
    keys, values = states(seen, tokens)
    results: list[Any] = []
    if isinstance(layer, getattr(cache_utils, "DummyLayer", ())):
        return results
    if hasattr(layer, "update"):
        results.append(layer.update(keys, values, {"cache_position": torch.arange(seen, seen + tokens)}))
    if hasattr(layer, "update_indexer"):
        results.append(layer.update_indexer(keys.sum(1)))
    if hasattr(layer, "update_conv_state"):
        last = layer.number_of_states - 1  # leaves the other states of a layer with several empty
        results.append(layer.update_conv_state(keys.transpose(1, 2).flatten(2).mT, last, conv_kernel_size=3))
        results.append(layer.update_recurrent_state(keys.sum(-2), last))
    return results


def _recording() -> Any:
    layer = cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW)
    layer.activate_past_recording()
    return layer


def _samples() -> list[Sample]:
    full, sliding = LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=WINDOW)
    if not LIST_BASED:
        sliding.layer_types = ["full_attention", "sliding_attention"]
    samples = [
        Sample("DynamicCache", cache_utils.DynamicCache, feed_cache),
        Sample("EncoderDecoderCache", _encoder_decoder, feed_encoder_decoder),
    ]
    # The arguments that StaticCache and its relatives take in one release or another.
    sizes = {"max_batch_size": BATCH, "max_cache_len": CAPACITY, "device": "cpu", "dtype": torch.float32}
    for name in ("StaticCache", "SlidingWindowCache", "HybridCache", "HybridChunkedCache"):
        cls = getattr(cache_utils, name, None)
        if cls is not None and cls.__name__ == name:
            config = full if name == "StaticCache" else sliding
            samples.append(Sample(name, lambda cls=cls, config=config: cls(config, **sizes), feed_cache))
    if hasattr(cache_utils, "MambaCache"):
        mamba = MambaConfig(hidden_size=4, num_hidden_layers=LAYERS, state_size=3, vocab_size=8)

        def make():
            return cache_utils.MambaCache(mamba, max_batch_size=BATCH, dtype=torch.float32)

        samples.append(Sample("MambaCache", make, feed_mamba))
    if not LIST_BASED:
        samples.append(Sample("DynamicCache-sliding", lambda: cache_utils.DynamicCache(config=sliding), feed_cache))
        samples.append(Sample("StaticCache-sliding", lambda: cache_utils.StaticCache(sliding, **sizes), feed_cache))
    for name in ("MtpCache", "DFlashCache"):
        if hasattr(cache_utils, name):
            samples.append(Sample(name, getattr(cache_utils, name), feed_cache))
    if HAS_STATES:

        def two_states():
            return cache_utils.LinearAttentionLayer(number_of_states=2)

        samples.append(Sample("LinearAttentionLayer-second-state", two_states, feed_layer))
        samples.append(Sample("DynamicSlidingWindowLayer-recording", _recording, feed_layer))
    for cls in cache_classes():
        if cls.__name__.endswith("Layer"):
            samples.append(Sample(cls.__name__, lambda cls=cls: _make_layer(cls), feed_layer))
    return samples


def _encoder_decoder() -> Any:
    return cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), cache_utils.DynamicCache())


def _make_layer(cls: type) -> Any:
    arguments = {"max_cache_len": CAPACITY, "sliding_window": WINDOW}
    return cls(**{name: value for name, value in arguments.items() if name in inspect.signature(cls).parameters})


SAMPLES = _samples()
