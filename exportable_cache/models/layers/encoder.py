"""The encoder of an encoder-decoder model: its inputs, its outputs, and the specs of the decoder's layers."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from ...cache.attention.implementation import attention_of
from ...cache.layer_spec import CROSS_ATTENTION, LayerSpec
from ...common.compat.transformers import cache_argument
from ...common.tensors import TensorSpec
from ...errors import InputError, UnsupportedModelError
from ..loading.support import WRONG_PADDED_IN_FLOAT16
from ..patches.mechanisms.speech import shortened_lengths
from ..positions import tables_in
from .specs import layer_types_and_windows, probe_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEFAULT_ENCODER_LENGTH = 512
#: 30 seconds: samples at 16 kHz, frames of 10 ms.
DEFAULT_SAMPLES = 30 * 16000
DEFAULT_FRAMES = 30 * 100

#: Name of the length dimension of the encoder's output.
ENCODER_LENGTH = "encoder_length"


@dataclass(frozen=True)
class Encoder:
    """A description of an encoder's input and output.

    Attributes:
        main_input: Input tensor, see `_input_of` for the kinds. Its dynamic dimension is named "length".
        takes_mask: True if the encoder also takes a padding mask [batch, length].
        min_length: Shortest input.
        max_length: Longest input. Equal to `min_length` if the encoder takes one length only, or if cross-attention
            has no padding mask.
        capacity: Output positions for the longest input.
        hidden_size: Hidden size of the output.
        dtype: Dtype of the output, as the name of a torch dtype.
        multiple: Divisor of an input's length. Text is padded to a multiple, with a mask.
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
        """True if every input has the same length, so that the output has no padding."""
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
    """Run the encoder of a model.

    Args:
        model: The encoder-decoder model.
        attention_mask: int64 [batch, length], 1 for inputs and 0 for the padding after them.
        **main_input: See `Encoder.main_input`.

    Returns:
        Hidden states [batch, encoder_length, hidden_size], and the number of real ones per row, int64 [batch].
    """
    given_mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    outputs = model.get_encoder()(**main_input, **given_mask)
    pooled = getattr(outputs, "pooler_output", None)
    # The decoder of PP-FormulaNet attends to the pooler output, which is a sequence.
    hidden = pooled if isinstance(pooled, torch.Tensor) and pooled.dim() == 3 else outputs[0]
    given = getattr(outputs, "attention_mask", None)
    if given is not None:
        # Encoders that shorten their input return a mask of the output,
        lengths = given.to(torch.int64).sum(-1)
    elif attention_mask is not None:
        # or have a rule for its length; others return one position for each of the input.
        is_audio = any(name in _AUDIO for name in main_input)
        mask = attention_mask.to(torch.int64)
        lengths = shortened_lengths(model, mask) if is_audio else mask.sum(-1)
    else:
        lengths = torch.full((hidden.shape[0],), hidden.shape[1], dtype=torch.int64, device=hidden.device)
    return hidden, lengths


@dataclass
class EncoderStates(BaseModelOutput, BaseModelOutputWithPooling):
    """An encoder's output that a model accepts, with the hidden states under both names that models read.

    Some models also read a mask from it, int64 [batch, encoder_length], and those with experts the router logits.
    """

    @classmethod
    def of(cls, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> EncoderStates:
        """Create an output from [batch, encoder_length, hidden_size] and int64 [batch, encoder_length]."""
        return cls(last_hidden_state=hidden_states, pooler_output=hidden_states, attention_mask=attention_mask)

    attention_mask: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None


@torch.no_grad()
def encoder_of(model: PreTrainedModel, max_encoder_len: int | None = None, batch_size: int = 1) -> Encoder:
    """Describe the encoder of a model, from its config and from running it.

    Args:
        model: The encoder-decoder model.
        max_encoder_len: Longest input, in tokens, frames or samples. The default depends on the kind of input, and is
            at most the model's number of positions.
        batch_size: Batch size. Audio with several rows is padded, and so needs a mask.

    Raises:
        InputError: If the encoder does not support `max_encoder_len`.
        UnsupportedModelError: If the input is of an unknown kind, or the encoder gives wrong results in this dtype.
    """
    kind = _input_of(model, batch_size)
    name = type(model).__name__
    reason = WRONG_PADDED_IN_FLOAT16.get(model.config.model_type)
    if reason is not None and model.dtype == torch.float16:
        raise UnsupportedModelError(f"{name} in float16: {reason}; load it in bfloat16 or float32")
    longest = max_encoder_len or kind.default
    if kind.spec.name == "input_ids" and kind.multiple > 1:
        # At least 3 blocks, because a single block has another graph, and a single length would mean that there is no
        # padding.
        longest = max(3, -(-longest // kind.multiple)) * kind.multiple
    if kind.fixed is not None and longest != kind.fixed:
        raise InputError(
            f"max_encoder_len must be {kind.fixed}, the {kind.unit} that the encoder of {name} takes, got {longest}; "
            "leave it out"
        )
    if kind.limit is not None and longest > kind.limit:
        raise InputError(
            f"max_encoder_len must be at most {kind.limit}, the positions of the encoder of {name}, got {longest}; "
            f"pass at most {kind.limit}"
        )
    if longest < kind.least:
        raise InputError(f"max_encoder_len must be at least {kind.least} for {name}, got {longest}; raise it")
    if longest % kind.multiple:
        raise InputError(
            f"max_encoder_len must be a multiple of {kind.multiple}, the {kind.unit} of a frame of {name}, got "
            f"{longest}; pass a multiple"
        )
    spec, least = kind.spec, -(-kind.least // kind.multiple) * kind.multiple
    if kind.fixed is not None:
        spec = replace(spec, shape=tuple(longest if size == "length" else size for size in spec.shape))
        least = longest
    # Text keeps its length, which three tokens show; other encoders run on the longest input.
    is_text = spec.name == "input_ids"
    probe = 3 if is_text else longest
    shape = spec.sizes({"batch": 1, "length": probe})
    example = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=model.device)
    hidden, _ = run_encoder(model, **{spec.name: example})
    if is_text and hidden.shape[1] != probe:
        raise UnsupportedModelError(
            f"the encoder of {name} must return one position per token, got {hidden.shape[1]} for {probe}; it is not "
            "supported"
        )
    capacity = longest if is_text else hidden.shape[1]
    dtype = str(hidden.dtype).removeprefix("torch.")
    return Encoder(spec, kind.takes_mask, least, longest, capacity, hidden.shape[2], dtype, kind.multiple)


@dataclass(frozen=True)
class _Input:
    """A kind of encoder input: its tensor, the unit of its length, and the possible lengths.

    `fixed` is the only length that the encoder takes, if there is one; `limit` is its number of positions.
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
    """Return the kind of a model's encoder input.

    | name | tensor | length |
    |---|---|---|
    | `input_ids` | [batch, length] | tokens |
    | `input_values` | [batch, length] | samples |
    | `input_features` | [batch, length, features] | frames |
    | `input_features` of Whisper | [batch, features, length] | frames, fixed |
    | `flattened_patches` | [batch, length, 2 + pixels]: row, column and content of each | patches |
    | `pixel_values` | [batch, channels, length, length] or [batch, channels, height, length] | pixels, fixed |

    Raises:
        UnsupportedModelError: If it is another kind, or its sizes are not in the config.
    """
    config, encoder, dtype = model.config, model.get_encoder(), str(model.dtype).removeprefix("torch.")
    # `SpeechEncoderDecoderModel` takes what its encoder takes, under another name.
    name = encoder.main_input_name if model.main_input_name == "inputs" else model.main_input_name
    takes_mask = "attention_mask" in inspect.signature(encoder.forward).parameters
    # Because rows of audio differ in length, and a single row has no padding.
    audio_mask = takes_mask and batch_size > 1
    if name == "input_ids":
        limit = _positions(model)
        block = _block_of(model) if takes_mask else 1
        default = DEFAULT_ENCODER_LENGTH if limit is None else min(DEFAULT_ENCODER_LENGTH, limit)
        spec = TensorSpec(name, "int64", ("batch", "length"))
        return _Input(spec, "tokens", default, takes_mask, limit, least=1 if block == 1 else 2 * block, multiple=block)
    if name == "input_values":
        # Moonshine Streaming splits samples into frames.
        frame = next((module.frame_len for module in model.get_encoder().modules() if hasattr(module, "frame_len")), 1)
        spec = TensorSpec(name, dtype, ("batch", "length"))
        return _Input(spec, "samples", DEFAULT_SAMPLES // frame * frame, audio_mask, least=1024, multiple=frame)
    if name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # Fixed, because Whisper's encoder adds its whole position table, and its cross-attention has no mask.
        length = 2 * config.max_source_positions
        return _Input(
            TensorSpec(name, dtype, ("batch", config.num_mel_bins, "length")), "frames", length, False, fixed=length
        )
    width = _sizes(config, _WIDTHS.get(name, ()))
    if name == "input_features" and width is not None:
        limit = getattr(config, "max_source_positions", None)
        default = DEFAULT_FRAMES if limit is None else min(DEFAULT_FRAMES, limit)
        # At least 16 frames, because convolutions shorten the input.
        return _Input(
            TensorSpec(name, dtype, ("batch", "length", width)), "frames", default, audio_mask, limit, least=16
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
    size = _image_size(config) if name == "pixel_values" else None
    if size is not None:
        channels = _first(config, "num_channels") or 3
        is_square = size[0] == size[1]
        spec = TensorSpec(name, dtype, ("batch", channels, "length" if is_square else size[0], "length"))
        return _Input(spec, "pixels a side" if is_square else "pixels of width", size[1], False, fixed=size[1])
    raise UnsupportedModelError(
        f"the encoder of {type(model).__name__} takes {name!r}, which is not supported; supported are token ids, audio "
        "samples, log-mel features, patches and pixels whose sizes are in the config"
    )


_AUDIO = ("input_values", "input_features")

#: Config fields whose product is the last dimension of an input, in the order of lookup.
_WIDTHS: dict[str, tuple[tuple[str, ...], ...]] = {
    "input_features": (
        ("num_mel_bins",),
        ("feature_projection_input_dim",),
        ("input_feat_per_channel", "input_channels"),
    ),
    "flattened_patches": (("patch_embed_hidden_size",),),
}


def _sizes(config: Any, fields: tuple[tuple[str, ...], ...]) -> int | None:
    """Return the product of the first of `fields` that the config, or its encoder's, has."""
    for names in fields:
        for owner in _owners(config):
            values = [getattr(owner, name, None) for name in names]
            sizes = [value for value in values if isinstance(value, int)]
            if len(sizes) == len(names):
                return math.prod(sizes)
    return None


def _owners(config: Any) -> list[Any]:
    """Return a config and that of its encoder, which `VisionEncoderDecoderConfig` calls `encoder`."""
    inside = (getattr(config, name, None) for name in ("encoder_config", "vision_config", "encoder"))
    return [config, *(one for one in inside if one is not None)]


def _first(config: Any, name: str) -> Any:
    """Return a field of the config, or of its encoder's; None if neither has it."""
    found = (getattr(owner, name, None) for owner in _owners(config))
    return next((one for one in found if one is not None), None)


def _image_size(config: Any) -> tuple[int, int] | None:
    """Return the height and width of images, or None if the config does not fix them."""
    size = _first(config, "image_size")
    sides = [size] * 2 if isinstance(size, int) else size
    if not isinstance(sides, (list, tuple)) or len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        return None
    return sides[0], sides[1]


def _block_of(model: PreTrainedModel) -> int:
    """Return the tokens of a block if the encoder attends within blocks, else 1.

    Inputs are whole blocks, because the padding of others depends on their length and would need other graphs.
    """
    # Not the text config, which lacks the kind of attention.
    config = model.config
    if hasattr(config, "local_radius"):
        # LongT5, whose other kind of attention has local and global blocks.
        local = config.local_radius + 1
        return local if config.encoder_attention_type == "local" else math.lcm(local, config.global_block_size)
    return getattr(config, "block_size", 1) if hasattr(config, "stagger_local_blocks") else 1


def _positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of the encoder's position table, or None without one."""
    # Florence-2's encoder has the config of the decoder.
    owners = (model.config.get_text_config(encoder=True), model.config.get_text_config(decoder=True))
    found = (getattr(owner, "max_position_embeddings", None) for owner in owners)
    limit = next((one for one in found if isinstance(one, int)), None)
    encoder = model.get_encoder()
    try:
        tokens = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # transformers does not find the embeddings of every encoder
        tokens = getattr(encoder, "embed_tokens", None)
    # Because some tables begin with up to two rows for padding. Those of M2M100 are buffers, and would have to grow.
    fits = limit is not None and any(limit <= rows <= limit + 2 for _, rows in tables_in(encoder, tokens))
    return limit if fits else None


@torch.no_grad()
def encoder_decoder_layers(
    model: PreTrainedModel, encoder: Encoder
) -> tuple[list[LayerSpec], torch.dtype, torch.device]:
    """Return specs of the self-attention layers, then of the cross-attention layers, and their dtype and device.

    Raises:
        UnsupportedModelError: If the model does not keep keys and values in a transformers `EncoderDecoderCache`.
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
        # Eager, because our attention functions mask slots, which transformers' cache does not have.
        with attention_of(model, "eager"):
            model(decoder_input_ids=token, encoder_outputs=states, use_cache=True, **{cache_argument(model): cache})
    finally:
        model.train(was_training)
    layers: list[Any] = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    written = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    if len(written) != len(kinds):
        raise UnsupportedModelError(
            f"{type(model).__name__} must write {half} layers of self-attention and {half} of cross-attention to its "
            f"cache, got {len(written)}; layers that keep keys and values elsewhere are not supported"
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
