"""Methods of an encoder-decoder model: the encoder, and the steps of its decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...common.method_io import TensorSpec, name_forward
from ...errors import InputError
from ...models.layers.encoder import ENCODER_LENGTH, EncoderStates, run_encoder
from ..methods import ProgramMethod, methods_for
from ..spec import ProgramSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...models.cache_factory import ExportableEncoderDecoderCache
    from ...models.layers.encoder import Encoder


def encode_method(encoder: Encoder) -> ProgramMethod:
    """Return the method `encode`, from input and mask to hidden states and their number per row."""
    mask = (TensorSpec("attention_mask", "int64", ("batch", "length")),) if encoder.takes_mask else ()
    hidden, lengths = encoder.outputs
    # The output length follows from the input length, so it is not a dynamic size here.
    ranges = {} if encoder.is_fixed else {ENCODER_LENGTH: (1, encoder.capacity)}
    return ProgramMethod(
        "encode",
        encoder.min_length,
        encoder.max_length,
        inputs=(encoder.main_input, *mask),
        ranges=ranges,
        outputs=(hidden, lengths),
        multiple=encoder.multiple,
    )


class EncodeModule(nn.Module):
    """Module of the method `encode`."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder) -> None:
        super().__init__()
        # The whole model, because programs that are packaged together share weights by name.
        self.model = model
        name_forward(self, encode_method(encoder).input_names)

    def call(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the encoder, see `run_encoder`."""
        return run_encoder(self.model, **inputs)


def seq2seq_methods(cache: ExportableEncoderDecoderCache, spec: ProgramSpec | None = None) -> dict[str, ProgramMethod]:
    """Return `encode` and the decoder's methods: prefill takes the encoder's output, decode only tokens and positions.

    Prefill also takes a single token, because most decoders start with one.

    Args:
        cache: The cache, with its encoder.
        spec: Only `prefill_chunk` and `buckets` are used.

    Raises:
        InputError: If the cache has no encoder.
    """
    if cache.encoder is None:
        raise InputError("cache.encoder must be set, got None; allocate the cache with ExportableCache.from_model")
    methods = {"encode": encode_method(cache.encoder)}
    spec = ProgramSpec() if spec is None else spec
    for name, method in methods_for(cache, ProgramSpec(spec.prefill_chunk, buckets=spec.buckets)).items():
        methods[name] = method if method.max_length == 1 else _with_encoder(method, cache.encoder)
    if spec.prefill_chunk == 1:
        methods["prefill"] = _with_encoder(ProgramMethod("prefill", 1, 1), cache.encoder)
    return methods


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
