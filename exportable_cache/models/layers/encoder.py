"""The encoder of an encoder-decoder model: what it takes, what comes out, and the method that runs it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from ...cache.attention.implementation import attention_of
from ...cache.layer_spec import CROSS_ATTENTION, LayerSpec
from ...common.method_io import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ..loading.support import WRONG_PADDED_IN_FLOAT16
from ..patches.mechanisms.speech import shortened_lengths
from .layout import layer_types_and_windows, probe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEFAULT_ENCODER_LENGTH = 512
#: Half a minute: samples at 16 kHz, frames of 10 ms.
DEFAULT_SAMPLES = 30 * 16000
DEFAULT_FRAMES = 30 * 100

#: Name of the size of the encoder's output, among those of a method.
ENCODER_LENGTH = "encoder_length"


@dataclass(frozen=True)
class Encoder:
    """What an encoder takes and gives.

    Attributes:
        main_input: The tensor it reads; see `_inputs_of` for the kinds. The axis that may differ from call to call is
            named "length".
        takes_mask: Whether it takes a padding mask [batch, length] as well.
        min_length, max_length: Shortest and longest input. Equal where the encoder, or the cross-attention, which then
            knows no padding, takes one length only.
        capacity: Positions it gives for the longest input.
        hidden_size: Of its output.
        dtype: Of its output, as the name of a torch dtype.
        multiple: What the length of an input is a multiple of. Text is padded to one, behind a mask.
    """

    main_input: TensorSpec
    takes_mask: bool
    min_length: int
    max_length: int
    capacity: int
    hidden_size: int
    dtype: str
    multiple: int = 1

    @property
    def is_fixed(self) -> bool:
        """Whether every input has the same length, so that every position of the output is real."""
        return self.min_length == self.max_length

    @property
    def outputs(self) -> tuple[TensorSpec, TensorSpec]:
        """Hidden states [batch, encoder_length, hidden_size], and the number of real ones per row, int64 [batch]."""
        length = self.capacity if self.is_fixed else ENCODER_LENGTH
        return (
            TensorSpec("encoder_hidden_states", self.dtype, ("batch", length, self.hidden_size)),
            TensorSpec("encoder_lengths", "int64", ("batch",)),
        )


def run_encoder(
    model: PreTrainedModel, attention_mask: torch.Tensor | None = None, **main_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        attention_mask: int64 [batch, length], 1 on what is real and 0 on the padding behind it.
        **main_input: See `Encoder.main_input`.

    Returns:
        Hidden states [batch, encoder_length, hidden_size], and the number of real ones per row, int64 [batch].
    """
    given_mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    outputs = model.get_encoder()(**main_input, **given_mask)
    pooled = getattr(outputs, "pooler_output", None)
    # Where that is a sequence, it is what the decoder attends to (PP-FormulaNet).
    hidden = pooled if isinstance(pooled, torch.Tensor) and pooled.dim() == 3 else outputs[0]
    given = getattr(outputs, "attention_mask", None)
    if given is not None:
        # Encoders that shorten their input say which of the fewer positions are real,
        lengths = given.to(torch.int64).sum(-1)
    elif attention_mask is not None:
        # or how many of them are; others give one position for each of the input.
        is_sound = any(name in _SOUND for name in main_input)
        mask = attention_mask.to(torch.int64)
        lengths = shortened_lengths(model, mask) if is_sound else mask.sum(-1)
    else:
        lengths = torch.full((hidden.shape[0],), hidden.shape[1], dtype=torch.int64, device=hidden.device)
    return hidden, lengths


@dataclass
class EncoderStates(BaseModelOutput, BaseModelOutputWithPooling):
    """An encoder's output as models take it back, under either of the names that they look for it.

    Some look for the mask in it, int64 [batch, encoder_length], and those with experts for what their routers said.
    """

    @classmethod
    def of(cls, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> EncoderStates:
        """From [batch, encoder_length, hidden_size] and int64 [batch, encoder_length]."""
        return cls(last_hidden_state=hidden_states, pooler_output=hidden_states, attention_mask=attention_mask)

    attention_mask: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None


@torch.no_grad()
def encoder_of(model: PreTrainedModel, max_encoder_len: int | None = None, batch_size: int = 1) -> Encoder:
    """What the encoder of `model` takes, from its config and from running it.

    Args:
        max_encoder_len: Longest input, in tokens, frames or samples; a default of the kind of input, or what the model
            has positions for where that is less.
        batch_size: Rows. Audio in several rows has padding, and so a mask.

    Raises:
        InputError: If the encoder takes another length than `max_encoder_len`, or no such.
        UnsupportedModelError: If the encoder's input is of no known kind, or its own code is wrong in this dtype.
    """
    kind = _input_of(model, batch_size)
    name = type(model).__name__
    reason = WRONG_PADDED_IN_FLOAT16.get(model.config.model_type)
    if reason is not None and model.dtype == torch.float16:
        raise UnsupportedModelError(f"{name} in float16: {reason}; load it in bfloat16 or float32")
    longest = max_encoder_len or kind.default
    if kind.spec.name == "input_ids" and kind.multiple > 1:
        # Text is padded to whole blocks. A single one has a graph of its own, and one length alone would mean that
        # nothing is padded.
        longest = max(3, -(-longest // kind.multiple)) * kind.multiple
    if kind.fixed is not None and longest != kind.fixed:
        raise InputError(
            f"max_encoder_len is {longest}; the encoder of {name} takes {kind.fixed} {kind.unit}, no other number"
        )
    if kind.limit is not None and longest > kind.limit:
        raise InputError(
            f"max_encoder_len is {longest}, but the encoder of {name} has positions for {kind.limit}; pass at most that"
        )
    if longest < kind.least:
        raise InputError(f"max_encoder_len is {longest}; {name} needs at least {kind.least}")
    if longest % kind.multiple:
        raise InputError(
            f"max_encoder_len is {longest}; {name} takes whole frames of {kind.multiple} {kind.unit}: pass a multiple "
            "of that"
        )
    spec, least = kind.spec, -(-kind.least // kind.multiple) * kind.multiple
    if kind.fixed is not None:
        spec = replace(spec, shape=tuple(longest if size == "length" else size for size in spec.shape))
        least = longest
    # Text goes in and comes out at one length; what shortens its input is asked.
    is_text = spec.name == "input_ids"
    probe = 3 if is_text else longest
    shape = spec.sizes({"batch": 1, "length": probe})
    example = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=model.device)
    hidden, _ = run_encoder(model, **{spec.name: example})
    if is_text and hidden.shape[1] != probe:
        raise UnsupportedModelError(
            f"the encoder of {name} gives {hidden.shape[1]} positions for {probe} tokens; only encoders that give one "
            "for each are supported"
        )
    capacity = longest if is_text else hidden.shape[1]
    dtype = str(hidden.dtype).removeprefix("torch.")
    return Encoder(spec, kind.takes_mask, least, longest, capacity, hidden.shape[2], dtype, kind.multiple)


@dataclass(frozen=True)
class _Input:
    """A kind of input: its tensor, in what it is counted, and the lengths that there can be.

    `fixed` is the one length that the encoder takes, if it takes no other; `limit` what it has positions for.
    """

    spec: TensorSpec
    unit: str
    default: int
    takes_mask: bool
    limit: int | None = None
    fixed: int | None = None
    least: int = 1
    multiple: int = 1


def _input_of(model: PreTrainedModel, batch_size: int) -> _Input:
    """
    | name | tensor | length |
    |---|---|---|
    | `input_ids` | [batch, length] | tokens |
    | `input_values` | [batch, length] | samples |
    | `input_features` | [batch, length, features] | frames |
    | `input_features` of Whisper | [batch, features, length] | frames, one number of them |
    | `flattened_patches` | [batch, length, 2 + pixels]: row, column and content of each | patches |
    | `pixel_values` | [batch, channels, length, length] | pixels, one number of them |

    Raises:
        UnsupportedModelError: If it is none of these, or the config does not tell its sizes.
    """
    config, name, dtype = model.config, model.main_input_name, str(model.dtype).removeprefix("torch.")
    takes_mask = "attention_mask" in inspect.signature(model.get_encoder().forward).parameters
    # Sound in several rows is of several lengths; a single row is as long as it is.
    sound_mask = takes_mask and batch_size > 1
    if name == "input_ids":
        limit = _positions(model)
        block = _block_of(model) if takes_mask else 1
        default = DEFAULT_ENCODER_LENGTH if limit is None else min(DEFAULT_ENCODER_LENGTH, limit)
        spec = TensorSpec(name, "int64", ("batch", "length"))
        return _Input(spec, "tokens", default, takes_mask, limit, least=1 if block == 1 else 2 * block, multiple=block)
    if name == "input_values":
        # Moonshine Streaming cuts them into frames.
        frame = next((module.frame_len for module in model.get_encoder().modules() if hasattr(module, "frame_len")), 1)
        spec = TensorSpec(name, dtype, ("batch", "length"))
        return _Input(spec, "samples", DEFAULT_SAMPLES // frame * frame, sound_mask, least=1024, multiple=frame)
    if name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Whisper's encoder adds a table of positions to all of its output, and its cross-attention knows no mask.
        length = 2 * config.max_source_positions
        return _Input(
            TensorSpec(name, dtype, ("batch", config.num_mel_bins, "length")), "frames", length, False, fixed=length
        )
    width = _sizes(config, _WIDTHS.get(name, ()))
    if name == "input_features" and width is not None:
        limit = getattr(config, "max_source_positions", None)
        default = DEFAULT_FRAMES if limit is None else min(DEFAULT_FRAMES, limit)
        # Fewer frames than this are less than a convolution or two can shorten.
        return _Input(
            TensorSpec(name, dtype, ("batch", "length", width)), "frames", default, sound_mask, limit, least=16
        )
    if name == "flattened_patches" and width is not None:
        limit = getattr(config.vision_config, "seq_len", None)
        return _Input(
            TensorSpec(name, dtype, ("batch", "length", 2 + width)),
            "patches",
            min(2048, limit or 2048),
            takes_mask,
            limit,
        )
    if name == "pixel_values" and width is not None:
        channels = getattr(config.vision_config, "num_channels", 3)
        spec = TensorSpec(name, dtype, ("batch", channels, "length", "length"))
        return _Input(spec, "pixels a side", width, False, fixed=width)
    raise UnsupportedModelError(
        f"the encoder of {type(model).__name__} takes {name!r}; encoders of token ids, audio samples, log-mel "
        "features, patches and pixels are supported, where the config tells their sizes"
    )


_SOUND = ("input_values", "input_features")

#: Config fields whose product is the last axis of an input, in the order in which they are looked for.
_WIDTHS: dict[str, tuple[tuple[str, ...], ...]] = {
    "input_features": (
        ("num_mel_bins",),
        ("feature_projection_input_dim",),
        ("input_feat_per_channel", "input_channels"),
    ),
    "flattened_patches": (("patch_embed_hidden_size",),),
    "pixel_values": (("image_size",),),
}


def _sizes(config: Any, fields: tuple[tuple[str, ...], ...]) -> int | None:
    """The first of `fields` that the config has, or that of its encoder."""
    for names in fields:
        for owner in (config, getattr(config, "encoder_config", None), getattr(config, "vision_config", None)):
            values = [getattr(owner, name, None) for name in names]
            sizes = [value for value in values if isinstance(value, int)]
            if len(sizes) == len(names):
                return math.prod(sizes)
    return None


def _block_of(model: PreTrainedModel) -> int:
    """Tokens of a block, where the encoder attends within blocks and pads its input to whole ones.

    How much it pads depends on the length, so that there is one graph for whole blocks only.
    """
    # Its text config has lost the kind of attention.
    config = model.config
    if hasattr(config, "local_radius"):
        # LongT5; its other kind of attention has blocks of both kinds.
        local = config.local_radius + 1
        return local if config.encoder_attention_type == "local" else math.lcm(local, config.global_block_size)
    return getattr(config, "block_size", 1) if hasattr(config, "stagger_local_blocks") else 1


def _positions(model: PreTrainedModel) -> int | None:
    """Positions of the encoder's table, where it has one."""
    limit = getattr(model.config.get_text_config(encoder=True), "max_position_embeddings", None)
    encoder = model.get_encoder()
    try:
        tokens = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # not every encoder has them where transformers looks
        tokens = getattr(encoder, "embed_tokens", None)
    tables = [
        module.num_embeddings
        for module in encoder.modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    return limit if isinstance(limit, int) and any(limit <= rows <= limit + 2 for rows in tables) else None


@torch.no_grad()
def encoder_decoder_layers(
    model: PreTrainedModel, encoder: Encoder
) -> tuple[list[LayerSpec], torch.dtype, torch.device]:
    """Specs of the self-attention layers, then of the cross-attention layers, and their dtype and device.

    Raises:
        UnsupportedModelError: If the model keeps them elsewhere than in a transformers `EncoderDecoderCache`.
    """
    kinds = layer_types_and_windows(model.config)
    half = len(kinds) // 2
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    length = encoder.capacity if encoder.is_fixed else 3
    states = EncoderStates.of(
        torch.zeros(1, length, encoder.hidden_size, dtype=getattr(torch, encoder.dtype), device=model.device)
    )
    was_training = model.training
    model.eval()
    try:
        token = probe_tokens(model)
        # Whatever it was switched to, as by an earlier cache: over transformers' own cache ours has no slots to mask.
        with attention_of(model, "eager"):
            model(decoder_input_ids=token, encoder_outputs=states, past_key_values=cache, use_cache=True)
    finally:
        model.train(was_training)
    layers: list[Any] = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    written = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    if len(written) != len(kinds):
        raise UnsupportedModelError(
            f"{type(model).__name__} wrote {len(written)} layers to its cache, {half} of self-attention and as many of "
            "cross-attention were expected; layers that keep their keys and values elsewhere are not supported"
        )
    layer_specs = [
        LayerSpec(
            layer_type,
            num_heads=layer.keys.shape[1],
            head_dim=layer.keys.shape[3],
            value_head_dim=layer.values.shape[3],
            window=window,
            encoder_slots=encoder.capacity if layer_type == CROSS_ATTENTION else None,
        )
        for (layer_type, window), layer in zip(kinds, layers, strict=True)
    ]
    return layer_specs, layers[0].keys.dtype, layers[0].keys.device
