"""An encoder-decoder's encoder: what it checks, and what it gives for the decoder's first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ...errors import InputError
from ..checks import check_ids, check_no_autocast

if TYPE_CHECKING:
    from ...common.method_io import TensorSpec
    from ...models.cache_factory import ExportableEncoderDecoderCache
    from ...program.methods import ProgramMethod
    from ..checks import ProgramLimits
    from ..state import SequenceState
    from ..stepper import ProgramStepper


class EncoderStage:
    """Runs the method `encode`, whose outputs every prefill takes; the decoder's own tokens are text.

    Args:
        method: The encoder.
        limits: Of the program.
    """

    def __init__(self, method: ProgramMethod, limits: ProgramLimits) -> None:
        self.method = method
        self.limits = limits
        self.batch_size = limits.batch_size
        self.device = limits.device

    def encode(self, inputs: dict[str, Any], stepper: ProgramStepper) -> torch.Tensor:
        """Run the encoder over what a tokenizer or processor gives; `attention_mask` may be left out.

        Returns:
            Hidden states [batch, encoder_length, hidden_size], which the state has as `encoded` from now on.

        Raises:
            InputError: If an input is missing, unknown, or has a wrong shape, dtype or device; nothing has changed
                then.
        """
        check_no_autocast(self.device)
        name = self.method.inputs[0].name
        unknown = sorted(set(inputs) - {name, "attention_mask"})
        if name not in inputs or unknown:
            raise InputError(
                f"encode takes {name} and attention_mask, got {', '.join(inputs) or 'nothing'}; pass {name}=..."
            )
        main_input = inputs[name]
        self._check(main_input)
        length = main_input.shape[self._length_dim]
        mask = inputs.get("attention_mask")
        if mask is not None:
            self._check_mask(mask, length)
        padding = max(length + -length % self.method.multiple, self.method.min_length) - length
        arguments = [F.pad(main_input, (0, padding)) if padding else main_input]
        if "attention_mask" in self.method.input_names:
            full = torch.ones(self.batch_size, length, dtype=torch.int64, device=self.device)
            arguments.append(F.pad(full if mask is None else mask.to(torch.int64), (0, padding)))
        stepper.state = replace(stepper.state, encoded=tuple(stepper.runner.run("encode", *arguments)))
        return stepper.state.encoded[0]

    def check_encoded(self, state: SequenceState) -> None:
        """Refuse a step for which nothing was encoded.

        Raises:
            InputError: If so.
        """
        if not state.encoded:
            raise InputError(f"nothing was encoded yet; call session.encode({self.method.inputs[0].name}=...) first")

    def check_given(self, encoded: Sequence[torch.Tensor]) -> None:
        """Refuse tensors of a file that this encoder cannot have given.

        Raises:
            ValueError: Then.
        """
        check_tensors(encoded, self.method.outputs, {"batch": self.batch_size})
        hidden, lengths = encoded
        if bool((lengths < 0).any()) or bool((lengths > hidden.shape[1]).any()):
            raise ValueError(f"{lengths.tolist()} states of an encoder, of 0 to {hidden.shape[1]}")

    def update_cache(self, cache: ExportableEncoderDecoderCache, state: SequenceState) -> None:
        """Tell a cache whether its cross-attention layers hold what the newest `encode` gave, and in how many slots."""
        cache.is_updated = dict.fromkeys(range(len(cache)), state.has_begun)
        if state.has_begun and state.encoded:
            for layer in cache.cross_layers:
                layer.written = state.encoded[0].shape[1]

    @property
    def _length_dim(self) -> int:
        shape = self.method.inputs[0].shape
        return shape.index("length") if "length" in shape else len(shape) - 1

    def _check(self, main_input: Any) -> None:
        spec = self.method.inputs[0]
        if spec.dtype == "int64":
            check_ids(spec.name, main_input, ("batch", "length"), self.limits)
        if not isinstance(main_input, torch.Tensor):
            raise InputError(f"{spec.name} is a {type(main_input).__name__}; pass a {spec.dtype} tensor")
        least, most = self.method.min_length, self.method.max_length
        shape: dict[int | str, int | str] = {"batch": self.batch_size}
        expected = [shape.get(size, size) for size in spec.shape]
        found = list(main_input.shape)
        if len(found) != len(expected) or any(size not in (given, "length") for size, given in zip(expected, found)):
            raise InputError(f"{spec.name} has shape {found}; it must be [{', '.join(map(str, expected))}]")
        least = 1 if self.method.pads else least
        if "length" in spec.shape and not least <= found[self._length_dim] <= most:
            raise InputError(
                f"{spec.name} has length {found[self._length_dim]}; the encoder takes {least} to {most}: shorten the "
                "input, or allocate or export with a larger max_encoder_len"
            )
        if "length" in spec.shape and found[self._length_dim] % self.method.multiple and not self.method.pads:
            raise InputError(
                f"{spec.name} has length {found[self._length_dim]}; the encoder takes whole frames of "
                f"{self.method.multiple}: cut it, or pad it with silence"
            )
        if main_input.dtype != getattr(torch, spec.dtype):
            raise InputError(
                f"{spec.name} is {main_input.dtype}; it must be torch.{spec.dtype}: pass "
                f"{spec.name}.to(torch.{spec.dtype})"
            )
        if main_input.device != self.device:
            raise InputError(f"{spec.name} is on {main_input.device}, the session runs on {self.device}")

    def _check_mask(self, mask: torch.Tensor, length: int) -> None:
        if "attention_mask" not in self.method.input_names:
            # Encoders of fixed length take none: silence is part of their input.
            if self.method.min_length != self.method.max_length and not bool(mask.all()):
                raise InputError(
                    "attention_mask has padding, which this encoder does not take; pass each input at its own length"
                )
            return
        if tuple(mask.shape) != (self.batch_size, length):
            raise InputError(f"attention_mask has shape {list(mask.shape)}; it must be [{self.batch_size}, {length}]")
        real = mask.to(torch.bool)
        if not bool(real[:, 0].all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise InputError(
                "attention_mask must be 1 on each row's tokens and 0 behind them; pad on the right "
                "(padding_side='right')"
            )


def check_tensors(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
    """Refuse tensors that are not as specified.

    Args:
        sizes: Sizes by name; those of other names may be any number of at least 1.

    Raises:
        ValueError: Then.
    """
    if len(tensors) != len(specs):
        raise ValueError(f"{len(tensors)} tensors of an encoder, of {len(specs)}")
    for tensor, spec in zip(tensors, specs, strict=True):
        expected = [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape]
        found = list(tensor.shape)
        fits = len(found) == len(expected) and all(
            size >= 1 if isinstance(wanted, str) else size == wanted
            for size, wanted in zip(found, expected, strict=True)
        )
        if not fits or tensor.dtype != getattr(torch, spec.dtype):
            raise ValueError(f"{spec.name} of {tensor.dtype} {found}, where it is {spec.dtype} {expected}")


def start_tokens(generation_config: Any, batch_size: int, device: torch.device) -> torch.Tensor:
    """What a decoder starts with, int64 [batch, 1]: the model's `decoder_start_token_id`, or its `bos_token_id`.

    Raises:
        InputError: If it states neither.
    """
    for name in ("decoder_start_token_id", "bos_token_id"):
        token = getattr(generation_config, name, None)
        if isinstance(token, int):
            return torch.full((batch_size, 1), token, dtype=torch.int64, device=device)
    raise InputError("the model states no decoder_start_token_id; pass the decoder's first tokens to generate")
