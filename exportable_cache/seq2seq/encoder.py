"""The encoder of an encoder-decoder model: what it takes, what comes out, and the method that runs it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..errors import InputError, UnsupportedModelError
from ..methods import Method, TensorSpec
from ..named_forward import name_forward

DEFAULT_ENCODER_LENGTH = 512
#: Half a minute at 16 kHz.
DEFAULT_SAMPLES = 30 * 16000

#: Name of the size of the encoder's output, among those of a method.
ENCODER_LENGTH = "encoder_length"


@dataclass(frozen=True)
class Encoder:
    """What an encoder takes and gives.

    Attributes:
        main_input: The tensor it reads, [batch, length] token ids or samples, or [batch, bins, length] features.
        takes_mask: Whether it takes a padding mask [batch, length] as well.
        min_length, max_length: Shortest and longest input. Equal where the encoder, or the cross-attention, which then
            knows no padding, takes one length only.
        capacity: Positions it gives for the longest input.
        hidden_size: Of its output.
        dtype: Of its output, as the name of a torch dtype.
    """

    main_input: TensorSpec
    takes_mask: bool
    min_length: int
    max_length: int
    capacity: int
    hidden_size: int
    dtype: str

    @property
    def is_fixed(self) -> bool:
        """Whether every input has the same length, so that every position of the output is real."""
        return self.min_length == self.max_length

    @property
    def method(self) -> Method:
        """`encode`: input and mask to hidden states and the number of real ones per row."""
        mask = (TensorSpec("attention_mask", "int64", ("batch", "length")),) if self.takes_mask else ()
        hidden, lengths = self.outputs
        # How long the output is follows from the input, so it is no size of its own here.
        ranges = {} if self.is_fixed else {ENCODER_LENGTH: (1, self.capacity)}
        return Method(
            "encode", self.min_length, self.max_length, inputs=(self.main_input, *mask), ranges=ranges, outputs=(hidden, lengths)
        )

    @property
    def outputs(self) -> tuple[TensorSpec, TensorSpec]:
        """Hidden states [batch, encoder_length, hidden_size], and the number of real ones per row, int64 [batch]."""
        length = self.capacity if self.is_fixed else ENCODER_LENGTH
        return (
            TensorSpec("encoder_hidden_states", self.dtype, ("batch", length, self.hidden_size)),
            TensorSpec("encoder_lengths", "int64", ("batch",)),
        )


class EncodeModule(nn.Module):
    """The method `encode`."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder) -> None:
        super().__init__()
        # All of it: programs that are packaged together share weights by their names in the whole model.
        self.model = model
        name_forward(self, encoder.method.input_names)

    def call(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `run_encoder`."""
        return run_encoder(self.model, **inputs)


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
    mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    outputs = model.get_encoder()(**main_input, **mask)
    hidden = outputs[0]
    given = getattr(outputs, "attention_mask", None)
    # Encoders that shorten their input say which of the fewer positions are real.
    mask = attention_mask if given is None else given
    if mask is None:
        lengths = torch.full((hidden.shape[0],), hidden.shape[1], dtype=torch.int64, device=hidden.device)
    else:
        lengths = mask.to(torch.int64).sum(-1)
    return hidden, lengths


@dataclass
class EncoderStates(BaseModelOutput):
    """An encoder's output as models take it back.

    Some look for the mask in it, int64 [batch, encoder_length], and those with experts for what their routers said.
    """

    attention_mask: torch.Tensor | None = None
    router_logits: torch.Tensor | None = None


@torch.no_grad()
def encoder_of(model: PreTrainedModel, max_encoder_len: int | None = None, batch_size: int = 1) -> Encoder:
    """What the encoder of `model` takes, from its config and from running it.

    Args:
        max_encoder_len: Longest input, in tokens, frames or samples; a default of the kind of input, or what the model has
            positions for where that is less.
        batch_size: Rows. Audio in several rows has padding, and so a mask.

    Raises:
        InputError: If `max_encoder_len` is no positive int, or the encoder takes another length, or no such.
        UnsupportedModelError: If the encoder's input is of no known kind.
    """
    if max_encoder_len is not None and (not isinstance(max_encoder_len, int) or isinstance(max_encoder_len, bool) or max_encoder_len < 1):
        raise InputError(f"max_encoder_len is {max_encoder_len!r}; it must be an int of at least 1")
    config, name = model.config, model.main_input_name
    takes_mask = "attention_mask" in inspect.signature(model.get_encoder().forward).parameters
    dtype = str(model.dtype).removeprefix("torch.")
    least, fixed = 1, None
    if name == "input_ids":
        limit = _positions(model)
        default = DEFAULT_ENCODER_LENGTH if limit is None else min(DEFAULT_ENCODER_LENGTH, limit)
        main_input = TensorSpec(name, "int64", ("batch", "length"))
    elif name == "input_features" and hasattr(config, "num_mel_bins"):
        # Whisper's encoder adds a table of positions to all of its output, and its cross-attention knows no mask.
        fixed = default = limit = 2 * config.max_source_positions
        main_input, takes_mask = TensorSpec(name, dtype, ("batch", config.num_mel_bins, "length")), False
    elif name == "input_values":
        limit, default = None, DEFAULT_SAMPLES
        main_input = TensorSpec(name, dtype, ("batch", "length"))
        least, takes_mask = 1024, takes_mask and batch_size > 1
    else:
        raise UnsupportedModelError(
            f"the encoder of {type(model).__name__} takes {name!r}; encoders of token ids, of log-mel features of fixed length "
            "and of audio samples are supported"
        )
    longest = max_encoder_len or default
    if fixed is not None and longest != fixed:
        raise InputError(f"max_encoder_len is {longest}; the encoder of {type(model).__name__} takes {fixed} frames, no other number")
    if limit is not None and longest > limit:
        raise InputError(
            f"max_encoder_len is {longest}, but the encoder of {type(model).__name__} has positions for {limit}; pass at most that"
        )
    if longest < least:
        raise InputError(f"max_encoder_len is {longest}; {type(model).__name__} needs at least {least}")
    if fixed is not None:
        main_input = TensorSpec(name, main_input.dtype, tuple(fixed if size == "length" else size for size in main_input.shape))
        least = fixed
    # Text goes in and comes out at one length; what shortens its input is asked.
    probe = 3 if name == "input_ids" else longest
    shape = [{"batch": 1, "length": probe}.get(size, size) for size in main_input.shape]
    example = torch.zeros(shape, dtype=getattr(torch, main_input.dtype), device=model.device)
    hidden, _ = run_encoder(model, **{name: example})
    if name == "input_ids" and hidden.shape[1] != probe:
        raise UnsupportedModelError(
            f"the encoder of {type(model).__name__} gives {hidden.shape[1]} positions for {probe} tokens; "
            "only encoders that give one for each are supported"
        )
    capacity = longest if name == "input_ids" else hidden.shape[1]
    return Encoder(main_input, takes_mask, least, longest, capacity, hidden.shape[2], str(hidden.dtype).removeprefix("torch."))


def _positions(model: PreTrainedModel) -> int | None:
    """Positions of the encoder's table, where it has one."""
    limit = getattr(model.config.get_text_config(encoder=True), "max_position_embeddings", None)
    tokens = model.get_encoder().get_input_embeddings()
    tables = [
        module.num_embeddings
        for module in model.get_encoder().modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    return limit if isinstance(limit, int) and any(limit <= rows <= limit + 2 for rows in tables) else None
