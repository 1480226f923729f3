"""`ExportableCache`, allocated from a model or from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from ..cache.attention.functions import ATTENTION, register_attention
from ..cache.attention.implementation import set_attention
from ..cache.cache import EncoderDecoderLayeredCache, LayeredCache
from ..cache.offload import offloaded
from ..cache.spec import CacheSpec
from ..cache.step import PLAIN
from ..common.compat.transformers import pipeline_stage, set_attention_implementation
from ..common.devices import is_out_of_memory, memory_errors, out_of_memory, weights_bytes
from ..errors import ExportableCacheError, InputError, UnsupportedModelError, first_line
from ..parallel.heads import check_heads, parts_of_heads, repeat_heads
from ..parallel.ranks import ranks_of
from ..pytree import register_node
from .draft_heads import head_layer_specs
from .layers.encoder import encoder_decoder_layers, encoder_of
from .layers.specs import (
    check_cross_layers,
    check_model_type,
    check_sinks,
    item_slots_of,
    layer_specs_from_config,
    layer_specs_from_model,
)
from .patches.registry import config_types, model_types, patch_imported, patch_model, patch_types
from .quantized_rows import QuantizedRows, has_quantized_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

    from ..cache.layer_spec import LayerSpec
    from ..cache.layers import CacheLayer
    from ..cache.step import StepContext
    from ..parallel.ranks import Ranks
    from .layers.encoder import Encoder

register_attention()


def check_is_model(model: object) -> None:
    """Check that an object is a model of transformers.

    Raises:
        InputError: If it has no config.
    """
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise InputError(
            f"model must be a transformers model, got {type(model).__name__}; load one, or use from_config for a cache"
        )


class ExportableCache(LayeredCache):
    """A fixed-size KV cache whose lengths are tensors.

    It is a `transformers.Cache`: pass it as `past_key_values`, or `cache` from transformers 5.24 on, to a model, to
    `generate`, or in your own loop. No step depends on the sequence length, so one compiled or exported step serves
    every position.

    Its tensors carry no gradients. Outside of `torch.no_grad` gradients flow to the tokens of a call, and the results
    of earlier calls are constants; call `backward` before the next step, because buffers are written in place.
    `copy.deepcopy` returns an independent cache.

    Args:
        layers: One layer per decoder layer, all with the same batch size.

    Raises:
        InputError: If there are no layers, one is not a `CacheLayer`, or batch sizes differ.

    Example:
        >>> cache = ExportableCache.from_config(model.config, max_cache_len=1024)
        >>> model(input_ids, past_key_values=cache).logits

    Attributes:
        ranks: Processes that the model is split over; None for one process.
        parts_of_heads: Number of parts that the heads of each layer are split into, see `rank_heads`.
    """

    ranks: Ranks | None = None
    parts_of_heads: tuple[int, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        max_cache_len: int,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        rollback_slots: int = 0,
        attention_sinks: int | None = None,
        attention_window: int | None = None,
        kv_dtype: str | None = None,
        attn_implementation: str | None = ATTENTION,
    ) -> ExportableCache:
        """Allocate the cache of a model from its config, with a full buffer or a ring for each layer type.

        Args:
            config: The model's config object, not a copy, because its attention implementation is set to ours, which
                supports rings, padding and rows of different length. Other caches still work with it.
            max_cache_len: Tokens that a full-attention layer can hold.
            batch_size: Batch size.
            dtype: Dtype of keys and values; the config's dtype by default.
            device: Device of the cache.
            rollback_slots: Extra slots of each ring, so that `crop` can remove up to `rollback_slots + 1` tokens past
                the window.
            attention_sinks: Number of first tokens that full-attention layers keep in addition to the newest
                `attention_window`, for sequences without a length limit; see `policies.SinkPolicy`. Works with our
                attention functions only.
            attention_window: Newest tokens kept with `attention_sinks`; the rest of `max_cache_len` by default.
            kv_dtype: `float16` or `bfloat16` to store keys and values of a float32 model in 16 bits; `int8` or `int4`
                for 8 or 4 bits with one scale per token and head, see `cache.storage`; the model's dtype by default.
            attn_implementation: Implementation to set on the config; None leaves it unchanged. transformers' `sdpa`
                and `eager` work too, except with padding masks and rows of different length.

        Raises:
            InputError: If a value is out of range, see `CacheSpec`.
            UnsupportedModelError: If a layer's type is not supported.
        """
        spec = CacheSpec(
            max_cache_len,
            batch_size,
            dtype,
            device,
            rollback_slots,
            attention_sinks=attention_sinks,
            attention_window=attention_window,
            kv_dtype=kv_dtype,
        )
        return cls.from_config_spec(config, spec, attn_implementation)

    @classmethod
    def from_config_spec(
        cls, config: PreTrainedConfig, spec: CacheSpec, attn_implementation: str | None = ATTENTION
    ) -> ExportableCache:
        """Allocate a cache from a config and a spec; on the CPU if the spec has no device. See `from_config`."""
        if spec.max_encoder_len is not None:
            raise InputError(
                f"max_encoder_len must be left out, because a config does not describe the encoder, got "
                f"{spec.max_encoder_len}; use ExportableCache.from_model"
            )
        layer_specs = layer_specs_from_config(config)
        # Because sizes may come from the config, without a model that was patched.
        patch_types(config_types(config))
        if spec.sinks is not None:
            check_sinks(config, layer_specs)
        text_config = config.get_text_config(decoder=True)
        dtype = _dtype_of(spec) or getattr(text_config, "dtype", None) or torch.float32
        device = spec.device or "cpu"
        with memory_errors(device, lambda: _needed(layer_specs, replace(spec, dtype=dtype))):
            cache = cls([layer_spec.build(spec, dtype, device) for layer_spec in layer_specs])
        if attn_implementation is not None:
            set_attention_implementation(config, attn_implementation)
        cache._config = text_config
        cache.model_types = tuple(sorted(config_types(config)))
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
        rollback_slots: int = 0,
        attention_sinks: int | None = None,
        attention_window: int | None = None,
        max_encoder_len: int | None = None,
        kv_dtype: str | None = None,
        offload: str | Path | None = None,
        attn_implementation: str | None = ATTENTION,
    ) -> ExportableCache:
        """Allocate the cache of a model, with shapes, dtype and device read from one token run through it.

        An encoder-decoder gets an `ExportableEncoderDecoderCache`. For a tensor-parallel model every rank allocates its
        own heads, and all ranks must call this.

        Args:
            model: The model.
            max_cache_len: See `from_config`.
            batch_size: See `from_config`.
            dtype: Dtype of keys and values; that of the model's keys by default.
            device: Device of the cache; that of the model's keys by default.
            rollback_slots: See `from_config`.
            attention_sinks: See `from_config`.
            attention_window: See `from_config`.
            max_encoder_len: Longest input of an encoder-decoder's encoder, in tokens, frames or samples; see
                `encoder_of` for the default. For models with images the slots of images, see `ItemsPolicy.within`.
            kv_dtype: See `from_config`.
            offload: "host" to keep layers in host memory (pinned if steps run on a GPU), or a folder to keep them in
                mapped files. Each layer is copied to the device before it runs, so at most two are on it.
            attn_implementation: See `from_config`.

        Raises:
            InputError: If a value is out of range, see `CacheSpec`.
            UnsupportedModelError: If a layer's type is not supported, the model cannot run a token alone, or its heads
                cannot be split equally over ranks.
        """
        spec = CacheSpec(
            max_cache_len,
            batch_size,
            dtype,
            device,
            rollback_slots,
            attention_sinks=attention_sinks,
            attention_window=attention_window,
            kv_dtype=kv_dtype,
            max_encoder_len=max_encoder_len,
            offload=offload,
        )
        return cls.from_model_spec(model, spec, attn_implementation)

    @classmethod
    def from_model_spec(
        cls, model: PreTrainedModel, spec: CacheSpec, attn_implementation: str | None = ATTENTION
    ) -> ExportableCache:
        """Allocate a cache from a model and a spec. See `from_model`."""
        check_is_model(model)
        check_model_type(model.config)
        patch_model(model)
        if pipeline_stage(model) is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} must have all of its layers in each process, but it was loaded with pp_size; "
                "load it with tp_size, or in one process"
            )
        encoder, ranks = None, ranks_of(model)
        if ranks is not None:
            repeat_heads(model, ranks)
            check_heads(model, ranks)
        if getattr(model.config, "is_encoder_decoder", False):
            with _model_errors_as_unsupported(model):
                encoder = encoder_of(model, spec.max_encoder_len, spec.batch_size)
                layer_specs, dtype, device = encoder_decoder_layers(model, encoder)
            cls = ExportableEncoderDecoderCache
        elif spec.max_encoder_len is not None and not item_slots_of(model.config):
            raise InputError(
                f"max_encoder_len must be left out for {type(model).__name__}, which has no encoder, got "
                f"{spec.max_encoder_len}; remove it"
            )
        else:
            with _model_errors_as_unsupported(model):
                layer_specs, dtype, device = _layer_specs(model)
                layer_specs += head_layer_specs(model)
        check_cross_layers(model.config, ranks, spec.offload)
        if spec.sinks is not None:
            check_sinks(model.config, layer_specs)
        spec = replace(spec, dtype=spec.dtype or dtype, device=spec.device or device)
        with memory_errors(str(spec.device), lambda: _needed(layer_specs, spec)):
            cache = cls(_built(model, layer_specs, spec))
        if encoder is not None:
            assert isinstance(cache, ExportableEncoderDecoderCache)
            cache.encoder = encoder
        if attn_implementation is not None:
            set_attention(model, attn_implementation)
        cache._config = model.config.get_text_config(decoder=True)
        cache.model_types = tuple(sorted(model_types(model)))
        if ranks is not None:
            cache.ranks, cache.parts_of_heads = (
                ranks,
                parts_of_heads(model, layer_specs, ranks, layer_specs_from_config),
            )
        return cache

    def with_layers(self, layers: Sequence[CacheLayer]) -> Self:
        """Return a cache of the same model over other layers, such as those of a target."""
        return type(self)(layers)

    def save(self, path: str | Path) -> None:
        """Write the cache to a file, see `LayeredCache.save`; models split over processes are not supported."""
        if self.ranks is not None:
            raise InputError(
                f"a cache to save must not be split over processes, got rank {self.ranks.rank} of {self.ranks.size}; "
                "use save_state() of a session, which writes all ranks to one file"
            )
        super().save(path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> LayeredCache:
        """Load a cache that `save` wrote; the next step continues the sequence.

        The model may be loaded before or after, because patches of its types are applied here.

        Raises:
            BundleError: If the file is missing, damaged or not a saved cache.
            UnsupportedModelError: If a patch is for another release of transformers than the installed one.
        """
        cache = super().load(path, device)
        if cache.model_types is None:
            # Files of older releases do not name model types.
            patch_imported()
        else:
            patch_types(cache.model_types)
        return cache

    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:  # type: ignore[override]
        """Return the number of cached tokens, see `LayeredCache.get_seq_length`."""
        self._check_patches()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(  # type: ignore[override]
        self, query_length: int, layer_idx: int
    ) -> tuple[int, int | torch.Tensor]:
        """Return the mask's key length and offset, see `LayeredCache.get_mask_sizes`."""
        self._check_patches()
        return super().get_mask_sizes(query_length, layer_idx)

    def _check_patches(self) -> None:
        """Patch all imported models before the first step of a cache without a known model.

        Models read the length or the mask sizes before any layer runs. The model of a program is already patched.
        """
        if self.model_types is None and not torch.compiler.is_compiling():
            patch_imported()
            self.model_types = ()


# The types differ because transformers annotates lengths as int.
class ExportableEncoderDecoderCache(ExportableCache, EncoderDecoderLayeredCache):  # type: ignore[misc]
    """An `ExportableCache` of an encoder-decoder, see `EncoderDecoderLayeredCache` for layers and arguments.

    Attributes:
        encoder: Inputs and outputs of the encoder; None if unknown.
    """

    encoder: Encoder | None = None

    def with_state(self, tensors: Mapping[str, Any], context: StepContext = PLAIN) -> Self:
        """See `LayeredCache.with_state`."""
        cache = super().with_state(tensors, context)
        cache.encoder = self.encoder
        return cache

    def with_layers(self, layers: Sequence[CacheLayer]) -> Self:
        """See `ExportableCache.with_layers`."""
        cache = super().with_layers(layers)
        cache.encoder = self.encoder
        return cache


def _dtype_of(spec: CacheSpec) -> torch.dtype | None:
    """Return the dtype of a spec, whose names `CacheSpec` has replaced."""
    assert not isinstance(spec.dtype, str)
    return spec.dtype


def _layer_specs(model: PreTrainedModel) -> tuple[list[LayerSpec], torch.dtype, torch.device]:
    """Return `layer_specs_from_model`; for quantised weights read the config where it says enough.

    A token through a quantised model of billions of weights takes a minute.
    """
    if not has_quantized_weights(model):
        return layer_specs_from_model(model)
    try:
        return layer_specs_from_config(model.config), model.dtype, model.device
    except UnsupportedModelError:
        with QuantizedRows():
            return layer_specs_from_model(model)


def _needed(layer_specs: list[LayerSpec], spec: CacheSpec) -> dict[str, int]:
    """Return the bytes of a cache by name, for a message."""
    dtype = _dtype_of(spec)
    assert dtype is not None
    return {"the cache": sum(layer_spec.build(spec, dtype, "meta").nbytes for layer_spec in layer_specs)}


def _built(
    model: PreTrainedModel,
    layer_specs: list[LayerSpec],
    spec: CacheSpec,
) -> list[CacheLayer]:
    """Build the layers on the device, or offloaded if the spec says so.

    Raises:
        UnsupportedModelError: If the layers cannot be offloaded.
    """
    dtype, device = _dtype_of(spec), spec.device
    assert dtype is not None
    assert device is not None
    if spec.offload is None:
        return [layer_spec.build(spec, dtype, device) for layer_spec in layer_specs]
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"offload must be left out for {type(model).__name__}, whose layers read keys of other layers; leave it out"
        )
    return offloaded([layer_spec.build(spec, dtype, "meta") for layer_spec in layer_specs], spec.offload, device)


@contextmanager
def _model_errors_as_unsupported(model: PreTrainedModel) -> Iterator[None]:
    """Convert errors of model code inside the block to `UnsupportedModelError`."""
    try:
        yield
    except ExportableCacheError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(model.device, {"the weights": weights_bytes(model)}, "a step") from error
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run a token of text alone ({type(error).__name__}: "
            f"{first_line(error)}); pass its text decoder, or a model of text"
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
