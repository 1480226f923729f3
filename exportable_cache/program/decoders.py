"""Methods of text decoders and of encoder-decoders: which ones a program has, and their lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..common.tensors import TensorSpec, name_forward
from ..errors import InputError, UnsupportedModelError
from ..models.layers.encoder import ENCODER_LENGTH, EncoderStates, run_encoder
from .inputs.modalities import EncoderModality
from .methods import ProgramMethod
from .spec import ProgramSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
    from ..models.layers.encoder import Encoder


DEFAULT_PREFILL_CHUNK = 256
#: The same where `prefill` takes one length only, because what is left of a prompt is fed token by token.
FIXED_PREFILL_CHUNK = 32
#: Smallest length bucket, in slots. Below this, attention costs too little to be worth a method.
SMALLEST_BUCKET = 128


def methods_for(cache: ExportableCache, spec: ProgramSpec | None = None) -> dict[str, ProgramMethod]:
    """Return the methods of a text decoder over `cache`.

    Args:
        cache: The cache, whose capacity limits their lengths.
        spec: Which methods to make; `forward` and `split` must be bools, see `ProgramSpec.decided`.

    Raises:
        InputError: If `prefill_chunk`, `score_length` or a bucket exceeds the capacity of a row.
        UnsupportedModelError: If a layer keeps its whole prompt, and chunks have one length.
    """
    spec = ProgramSpec() if spec is None else spec
    score_length, split = spec.score_length, spec.split
    prefill_chunk = checked_prefill_chunk(cache, spec.prefill_chunk)
    if spec.fixed_chunk and spec.prefill_chunk is None:
        prefill_chunk = min(prefill_chunk, FIXED_PREFILL_CHUNK)
    if spec.fixed_chunk and any(layer.policy.keeps_prompt for layer in cache.layers):
        raise UnsupportedModelError(
            "a layer that keeps its whole prompt needs chunks of any length, which this target does not take; export "
            "for another target"
        )
    methods = [ProgramMethod("decode", 1, 1)] if split else []
    if split and prefill_chunk > 1:
        methods.append(ProgramMethod("prefill", prefill_chunk if spec.fixed_chunk else 2, prefill_chunk))
    if spec.forward or not split:
        # `forward` also scores drafts, because a second method would make runtimes that pack weights hold them twice.
        methods.append(ProgramMethod("forward", 1, prefill_chunk, scored_tokens=min(score_length, prefill_chunk)))
    if cache.max_length is not None and score_length > cache.max_length:
        raise InputError(
            f"score_length must be at most {cache.max_length}, the tokens a row holds, got {score_length}; lower it or "
            "raise max_cache_len"
        )
    if score_length and not spec.forward:
        methods.append(ProgramMethod("score", 2, score_length, scored_tokens=score_length))
    for bucket in spec.buckets:
        if cache.max_length is not None and bucket > cache.max_length:
            raise InputError(
                f"buckets must be at most {cache.max_length}, the tokens a row holds, got {bucket}; remove it"
            )
        methods.append(ProgramMethod(f"decode_{bucket}", 1, 1, bucket))
        if prefill_chunk > 1 and bucket > 1:
            methods.append(ProgramMethod(f"prefill_{bucket}", 2, min(prefill_chunk, bucket), bucket))
        if score_length and bucket > 1:
            most = min(score_length, bucket)
            methods.append(ProgramMethod(f"score_{bucket}", 2, most, bucket, scored_tokens=most))
    return {method.name: method for method in methods}


def checked_prefill_chunk(cache: ExportableCache, prefill_chunk: int | None) -> int:
    """Return the longest chunk of a prompt: the given one, or the default.

    Raises:
        InputError: If it is not positive, exceeds the capacity of the cache, or is too small for the model.
    """
    limit = cache.max_length
    if prefill_chunk is None:
        return DEFAULT_PREFILL_CHUNK if limit is None else min(DEFAULT_PREFILL_CHUNK, limit)
    if prefill_chunk < 1 or (limit is not None and prefill_chunk > limit):
        allowed = "at least 1" if limit is None else f"1 to {limit}, the tokens the cache holds"
        raise InputError(f"prefill_chunk must be {allowed}, got {prefill_chunk}")
    if prefill_chunk < 3 and any(layer.policy.keeps_prompt for layer in cache.layers):
        raise InputError(
            f"prefill_chunk must be at least 3 for a model that keeps its whole prompt, got {prefill_chunk}; raise it"
        )
    return prefill_chunk


def length_buckets(cache: ExportableCache) -> list[int]:
    """Return the powers of two from `SMALLEST_BUCKET` to below the largest capacity of a layer of `cache`."""
    most = max(layer.capacity or 0 for layer in cache.layers if layer.follows_decoder)
    return [2**power for power in range(math.ceil(math.log2(SMALLEST_BUCKET)), 63) if 2**power < most]


def encode_method(encoder: Encoder, items: EncoderModality | None = None) -> ProgramMethod:
    """Return the method `encode`, from input, mask and items to hidden states and their number per row."""
    mask = (TensorSpec("attention_mask", "int64", ("batch", "length")),) if encoder.takes_mask else ()
    hidden, lengths = encoder.outputs
    # The output length follows from the input length, so it is not a dynamic size here.
    ranges = {} if encoder.is_fixed else {ENCODER_LENGTH: (1, encoder.capacity)}
    return ProgramMethod(
        "encode",
        encoder.min_length,
        encoder.max_length,
        inputs=(encoder.main_input, *mask, *(() if items is None else items.batched_inputs)),
        ranges=ranges,
        outputs=(hidden, lengths),
        multiple=encoder.multiple,
        item=None if items is None else items.facts,
    )


class EncodeModule(nn.Module):
    """Module of the method `encode`."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder, items: EncoderModality | None = None) -> None:
        super().__init__()
        # The whole model, because programs that are packaged together share weights by name.
        self.model = model
        self.items = items
        name_forward(self, encode_method(encoder, items).input_names)

    def call(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the encoder, see `run_encoder`."""
        if self.items is not None:
            given = {spec.name: inputs.pop(spec.name) for spec in self.items.inputs}
            inputs["inputs_embeds"] = self.items.embedded(self.model, inputs.pop("input_ids"), given)
        return run_encoder(self.model, **inputs)


def seq2seq_methods(cache: ExportableEncoderDecoderCache, spec: ProgramSpec | None = None) -> dict[str, ProgramMethod]:
    """Return `encode` and the decoder's methods: prefill takes the encoder's output, decode only tokens and positions.

    Prefill also takes a single token, because most decoders start with one.

    Args:
        cache: The cache, with its encoder.
        spec: Only `prefill_chunk`, `buckets` and `modalities` are used.

    Raises:
        InputError: If the cache has no encoder, modalities are not among its text, or an item does not fit its input.
    """
    if cache.encoder is None:
        raise InputError("cache.encoder must be set, got None; allocate the cache with ExportableCache.from_model")
    spec = ProgramSpec() if spec is None else spec
    methods = {"encode": encode_method(cache.encoder, _items_of(cache.encoder, spec))}
    for name, method in methods_for(cache, ProgramSpec(spec.prefill_chunk, buckets=spec.buckets)).items():
        methods[name] = method if method.max_length == 1 else _with_encoder(method, cache.encoder)
    if spec.prefill_chunk == 1:
        methods["prefill"] = _with_encoder(ProgramMethod("prefill", 1, 1), cache.encoder)
    return methods


def _items_of(encoder: Encoder, spec: ProgramSpec) -> EncoderModality | None:
    """Return the items among the encoder's text, or None without modalities."""
    if not spec.modalities:
        return None
    kinds, items = ", ".join(one.kind for one in spec.modalities), spec.modalities[0]
    if len(spec.modalities) > 1 or not isinstance(items, EncoderModality):
        raise InputError(
            "modalities must be empty for an encoder-decoder, or one kind of item that its encoder takes among text, "
            f"got {kinds}; leave them out"
        )
    if items.tokens > encoder.capacity:
        raise InputError(
            f"max_encoder_len must be at least {items.tokens}, the placeholders of one {items.kind}, got "
            f"{encoder.capacity}; raise it"
        )
    return items


def _with_encoder(method: ProgramMethod, encoder: Encoder) -> ProgramMethod:
    ranges = {} if encoder.is_fixed else {ENCODER_LENGTH: (1, encoder.capacity)}
    return replace(method, min_length=1, inputs=(*method.inputs, *encoder.outputs), ranges=ranges)


def decoder_arguments(
    encoder: Encoder,
    cache: ExportableEncoderDecoderCache,
    input_ids: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_lengths: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the model's arguments for one step of its decoder, and set the encoder length in the cache.

    Args:
        encoder: The model's encoder.
        cache: The cache.
        input_ids: int64 [batch, length], decoder ids.
        encoder_hidden_states: [batch, encoder_length, hidden_size] in prefill, None in decode.
        encoder_lengths: int64 [batch], number of states that are not padding.
    """
    crosses = cache.cross_layers
    cache.is_updated = dict.fromkeys(range(len(cache)), encoder_hidden_states is None)
    if encoder_hidden_states is not None:
        assert encoder_lengths is not None
        for layer in crosses:
            layer.announce_length(encoder_lengths)
    else:
        # Models whose keys and values are cached only use the shape of the states.
        encoder_lengths = crosses[0].encoder_length
        encoder_hidden_states = torch.zeros(
            (1, 1, 1), dtype=getattr(torch, encoder.dtype), device=input_ids.device
        ).expand(input_ids.shape[0], encoder.capacity, encoder.hidden_size)
    mask = None
    if not encoder.is_fixed:
        positions = torch.arange(encoder_hidden_states.shape[1], device=input_ids.device)
        mask = (positions < encoder_lengths[:, None]).to(torch.int64)
    states = EncoderStates.of(encoder_hidden_states, mask)
    return {
        "decoder_input_ids": input_ids,
        "encoder_outputs": states,
        **({} if mask is None else {"attention_mask": mask}),
    }
