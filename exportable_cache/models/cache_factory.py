"""The caches users meet: allocated from a model, or from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.attention.functions import ATTENTION, register_attention, set_attention
from ..cache.cache import LayeredCache
from ..cache.encoder_decoder import EncoderDecoderLayeredCache
from ..cache.layout import LayerLayout, Sinks
from ..cache.storage import check_kv_dtype
from ..errors import ExportableCacheError, InputError, UnsupportedModelError, first_line
from ..pytree import register_node
from .encoder import encoder_of
from .encoder_decoder_layout import encoder_decoder_layers
from .layout import check_longest, check_model_type, check_sinks, layout_from_config, layout_from_model
from .patches.transformers import patch_model

register_attention()


class ExportableCache(LayeredCache):
    """A fixed-size KV cache whose lengths are tensors.

    It is a `transformers.Cache`: pass it as `past_key_values` to a model, to `generate`, or to a loop of your own. No
    step depends on how many tokens were seen, so a compiled or exported step serves every position.

    Args:
        layers: One layer per decoder layer, all of one batch size.

    Raises:
        InputError: If there are no layers, one is not a `CacheLayer`, or batch sizes differ.

    Example:
        >>> cache = ExportableCache.from_config(model.config, max_cache_len=1024)
        >>> model(input_ids, past_key_values=cache).logits
    """

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        max_cache_len: int,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        slack: int = 0,
        attention_sinks: int | None = None,
        attention_window: int | None = None,
        kv_dtype: str | None = None,
        attn_implementation: str | None = ATTENTION,
    ) -> ExportableCache:
        """Allocate the cache of a model from its config: per layer type a full buffer or a ring.

        Args:
            config: The model's own config object, not a copy: its attention implementation is switched to ours, which
                knows rings, padding and rows of different length. Models keep working with any other cache under it.
            max_cache_len: Tokens a full-attention layer can hold.
            batch_size: Rows.
            dtype: Of keys and values; the config's dtype by default.
            device: Where to allocate.
            slack: Extra slots of each ring, so that `crop` can take back `slack + 1` tokens past the window.
            attention_sinks: Have full-attention layers keep this many first tokens and the newest `attention_window`, and
                run without end: see `policies.SinkPolicy`. Works with our attention functions only.
            attention_window: What `attention_sinks` leave of `max_cache_len` by default.
            kv_dtype: `int8` or `int4` to keep keys and values in 8 or 4 bits with one scale per token and head, see
                `cache.storage`; the dtype that the model writes by default.
            attn_implementation: Name to set on the config; None leaves it alone. Under transformers' own `sdpa` and
                `eager` the cache works too, but for padding masks and rows of different length.

        Raises:
            InputError: If a size is not a positive int.
            UnsupportedModelError: If a layer's type has no storage policy here.
        """
        sinks = Sinks.within(max_cache_len, attention_sinks, attention_window)
        layouts = layout_from_config(config)
        check_longest(config, max_cache_len)
        if sinks is not None:
            check_sinks(config, layouts)
        dtype = dtype or getattr(config.get_text_config(decoder=True), "dtype", None) or torch.float32
        cache = cls._allocate(layouts, max_cache_len, batch_size, dtype, device, slack, sinks, kv_dtype)
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        cache._config = config.get_text_config(decoder=True)
        return cache

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        max_cache_len: int,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        slack: int = 0,
        attention_sinks: int | None = None,
        attention_window: int | None = None,
        max_encoder_len: int | None = None,
        kv_dtype: str | None = None,
        attn_implementation: str | None = ATTENTION,
    ) -> ExportableCache:
        """Allocate the cache of a model; shapes, dtype and device are read from one token run through it.

        See `from_config` for the arguments; `dtype` and `device` default to what the model writes. An encoder-decoder gets
        an `ExportableEncoderDecoderCache`.

        Args:
            max_encoder_len: Longest input of an encoder-decoder's encoder, in tokens, frames or samples; see
                `seq2seq.encoder_of` for the default.

        Raises:
            UnsupportedModelError: If a layer has no storage policy here, or the model cannot run a token by itself.
        """
        sinks = Sinks.within(max_cache_len, attention_sinks, attention_window)
        check_model_type(model.config)
        patch_model(model)
        encoder = None
        if getattr(model.config, "is_encoder_decoder", False):
            with _refused_if_it_fails(model):
                encoder = encoder_of(model, max_encoder_len, batch_size)
                layouts, model_dtype, model_device = encoder_decoder_layers(model, encoder)
            cls = ExportableEncoderDecoderCache
        elif max_encoder_len is not None:
            raise InputError(
                f"max_encoder_len is {max_encoder_len}, but {type(model).__name__} has no encoder; leave it out"
            )
        else:
            with _refused_if_it_fails(model):
                layouts, model_dtype, model_device = layout_from_model(model)
        check_longest(model.config, max_cache_len)
        if sinks is not None:
            check_sinks(model.config, layouts)
        cache = cls._allocate(
            layouts, max_cache_len, batch_size, dtype or model_dtype, device or model_device, slack, sinks, kv_dtype
        )
        if encoder is not None:
            cache.encoder = encoder
        if attn_implementation is not None:
            set_attention(model, attn_implementation)
        cache._config = model.config.get_text_config(decoder=True)
        return cache

    @classmethod
    def _allocate(
        cls,
        layouts: Iterable[LayerLayout],
        max_cache_len: int,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        slack: int,
        sinks: Sinks | None,
        kv_dtype: str | None,
    ) -> ExportableCache:
        for name, value in (("max_cache_len", max_cache_len), ("batch_size", batch_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; it must be an int of at least 1")
        check_kv_dtype(kv_dtype)
        return cls(
            [layout.build(batch_size, max_cache_len, dtype, device, slack, sinks, kv_dtype) for layout in layouts]
        )


class ExportableEncoderDecoderCache(ExportableCache, EncoderDecoderLayeredCache):
    """An `ExportableCache` that is a transformers `EncoderDecoderCache` too (cache_utils.py, 5.23).

    Its layers are those of the self-attention, followed by as many of the cross-attention. `is_updated` says per decoder
    layer whether the cross-attention's keys and values are there: a model computes them where it is false, and reads them
    where it is true.

    Args:
        layers: Self-attention layers, then one `CrossLayer` for each.
        encoder: What the encoder takes, None where that is unknown.

    Raises:
        InputError: If the second half are not the `CrossLayer`s of the first.
    """


@contextmanager
def _refused_if_it_fails(model: PreTrainedModel) -> Iterator[None]:
    """Any model code runs in the block: its errors, of any class, become a refusal."""
    try:
        yield
    except ExportableCacheError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run a token of text by itself ({type(error).__name__}: {first_line(error)}); "
            "pass its text decoder, or a model that takes text alone"
        ) from error


register_node(
    ExportableCache,
    lambda cache: ([("layers", cache.layers)], {}),
    lambda children, context: ExportableCache.from_layers(children[0]),
    name="exportable_cache.ExportableCache",
)

register_node(
    ExportableEncoderDecoderCache,
    lambda cache: ([("layers", cache.layers)], {}),
    lambda children, context: ExportableEncoderDecoderCache.from_layers(children[0]),
    name="exportable_cache.ExportableEncoderDecoderCache",
)
