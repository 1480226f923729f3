"""The encoder of an encoder-decoder: checks its input and computes the hidden states for the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ...errors import InputError
from ..checks import check_ids, check_no_autocast

if TYPE_CHECKING:
    from ...common.tensors import TensorSpec
    from ...models.cache_factory import ExportableEncoderDecoderCache
    from ...program.methods import ProgramMethod
    from ..checks import ProgramLimits
    from ..state import SequenceState
    from ..stepper import ProgramStepper


class EncoderStage:
    """Runs the method `encode`, whose outputs are inputs of the decoder's first step.

    Args:
        method: The method `encode`.
        limits: Limits of the program.
    """

    def __init__(self, method: ProgramMethod, limits: ProgramLimits) -> None:
        self.method = method
        # Its texts have one id a token, also where the decoder's have several (Dia).
        self.limits = replace(limits, codebooks=None)
        self.batch_size = limits.batch_size
        self.device = limits.device

    def encode(self, inputs: dict[str, Any], stepper: ProgramStepper) -> torch.Tensor:
        """Run the encoder over the output of a tokenizer or processor, and keep the result in the state.

        Args:
            inputs: Inputs by name; `attention_mask` is optional, and so are items if the text has no placeholders.
            stepper: Stepper whose state gets the result as `encoded`.

        Returns:
            Hidden states [batch, encoder_length, hidden_size].

        Raises:
            InputError: If an input is missing, unknown, or has a wrong shape, dtype or device; nothing has changed
                then.
        """
        check_no_autocast(self.device)
        name, further = self.method.inputs[0].name, [one.name for one in self._items]
        unknown = sorted(set(inputs) - {name, "attention_mask", *further})
        if name not in inputs or unknown:
            raise InputError(
                f"encode takes {', '.join((name, *further))} and attention_mask, got {', '.join(inputs) or 'nothing'}; "
                f"pass {name}=..."
            )
        main_input = inputs[name]
        self._check(self.method.inputs[0], main_input)
        items = self._checked_items(main_input, inputs)
        length = main_input.shape[self._length_dim]
        mask = inputs.get("attention_mask")
        if mask is not None:
            self._check_mask(mask, length)
        padding = max(length + -length % self.method.multiple, self.method.min_length) - length
        arguments = [F.pad(main_input, (0, padding)) if padding else main_input]
        if "attention_mask" in self.method.input_names:
            full = torch.ones(self.batch_size, length, dtype=torch.int64, device=self.device)
            arguments.append(F.pad(full if mask is None else mask.to(torch.int64), (0, padding)))
        arguments += items
        stepper.state = replace(stepper.state, encoded=tuple(stepper.runner.run("encode", *arguments)))
        return stepper.state.encoded[0]

    def check_encoded(self, state: SequenceState) -> None:
        """Check that the encoder has run.

        Raises:
            InputError: If it has not.
        """
        if not state.encoded:
            raise InputError(
                f"the encoder has not run yet; call session.encode({self.method.inputs[0].name}=...) first"
            )

    def check_given(self, encoded: Sequence[torch.Tensor]) -> None:
        """Check the encoder output of a file.

        Raises:
            ValueError: If this encoder cannot have computed it.
        """
        check_tensors(encoded, self.method.outputs, {"batch": self.batch_size})
        hidden, lengths = encoded
        if bool((lengths < 0).any()) or bool((lengths > hidden.shape[1]).any()):
            raise ValueError(f"encoder lengths must be from 0 to {hidden.shape[1]}, got {lengths.tolist()}")

    def update_cache(self, cache: ExportableEncoderDecoderCache, state: SequenceState) -> None:
        """Set the cross-attention flags of a cache, and the number of slots that the newest `encode` filled."""
        cache.is_updated = dict.fromkeys(range(len(cache)), state.has_begun)
        if state.has_begun and state.encoded:
            for layer in cache.cross_layers:
                layer.written = state.encoded[0].shape[1]

    @property
    def _items(self) -> tuple[TensorSpec, ...]:
        """Inputs besides text and mask, with one item per row."""
        return tuple(spec for spec in self.method.inputs[1:] if spec.name != "attention_mask")

    def _checked_items(self, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the items of all rows, or zeros for text without placeholders."""
        item, sizes = self.method.item, {"batch": self.batch_size}
        if item is None:
            return []
        given = [spec for spec in self._items if spec.name in inputs]
        for spec in given:
            self._check(spec, inputs[spec.name])
        counts = (input_ids == item.token_id).sum(-1).tolist()
        expected = item.tokens if given else 0
        if any(count != expected for count in counts) or 0 < len(given) < len(self._items):
            names = ", ".join(spec.name for spec in self._items)
            raise InputError(
                f"each row of input_ids must have {item.tokens} placeholders {item.token_id} with {names}, and none "
                f"without, got {counts} with {', '.join(spec.name for spec in given) or 'none'}; pass the output of "
                "the processor for one item per row"
            )
        return [
            inputs[spec.name]
            if given
            else torch.zeros(spec.sizes(sizes), dtype=getattr(torch, spec.dtype), device=self.device)
            for spec in self._items
        ]

    @property
    def _length_dim(self) -> int:
        shape = self.method.inputs[0].shape
        return shape.index("length") if "length" in shape else len(shape) - 1

    def _check(self, spec: TensorSpec, given: Any) -> None:
        if spec.dtype == "int64":
            check_ids(spec.name, given, ("batch", "length"), self.limits)
        if not isinstance(given, torch.Tensor):
            raise InputError(f"{spec.name} must be a {spec.dtype} tensor, got a {type(given).__name__}")
        least, most = self.method.min_length, self.method.max_length
        shape: dict[int | str, int | str] = {"batch": self.batch_size}
        expected = [shape.get(size, size) for size in spec.shape]
        found = list(given.shape)
        if len(found) != len(expected) or any(size not in (one, "length") for size, one in zip(expected, found)):
            raise InputError(f"{spec.name} must have shape [{', '.join(map(str, expected))}], got {found}")
        least = 1 if self.method.pads else least
        if "length" in spec.shape and not least <= found[self._length_dim] <= most:
            raise InputError(
                f"{spec.name} must have a length of {least} to {most}, got {found[self._length_dim]}; shorten the "
                "input, or allocate or export with a larger max_encoder_len"
            )
        if "length" in spec.shape and found[self._length_dim] % self.method.multiple and not self.method.pads:
            raise InputError(
                f"{spec.name} must have a length that is a multiple of {self.method.multiple}, got "
                f"{found[self._length_dim]}; cut it, or pad it with silence"
            )
        if given.dtype != getattr(torch, spec.dtype):
            raise InputError(
                f"{spec.name} must be torch.{spec.dtype}, got {given.dtype}; pass {spec.name}.to(torch.{spec.dtype})"
            )
        if given.device != self.device:
            raise InputError(f"{spec.name} must be on {self.device}, got {given.device}; move it")

    def _check_mask(self, mask: torch.Tensor, length: int) -> None:
        if "attention_mask" not in self.method.input_names:
            # An encoder of fixed length has no mask, because it reads the padding as silence.
            if self.method.min_length != self.method.max_length and not bool(mask.all()):
                raise InputError(
                    "attention_mask must be 1 everywhere for this encoder, got padding; pass inputs without padding"
                )
            return
        if tuple(mask.shape) != (self.batch_size, length):
            raise InputError(f"attention_mask must have shape [{self.batch_size}, {length}], got {list(mask.shape)}")
        real = mask.to(torch.bool)
        if not bool(real[:, 0].all()) or bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise InputError(
                "attention_mask must be 1 on each row's tokens and then 0; pad on the right (padding_side='right')"
            )


def check_tensors(tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
    """Check the number, shapes and dtypes of tensors.

    Args:
        tensors: Tensors of a file.
        specs: The specification of each.
        sizes: Sizes by name; a size of another name may be any number of at least 1.

    Raises:
        ValueError: If one differs.
    """
    if len(tensors) != len(specs):
        raise ValueError(f"the encoder output must have {len(specs)} tensors, got {len(tensors)}")
    for tensor, spec in zip(tensors, specs, strict=True):
        expected = [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape]
        found = list(tensor.shape)
        fits = len(found) == len(expected) and all(
            size >= 1 if isinstance(wanted, str) else size == wanted
            for size, wanted in zip(found, expected, strict=True)
        )
        if not fits or tensor.dtype != getattr(torch, spec.dtype):
            raise ValueError(f"{spec.name} must be {spec.dtype} {expected}, got {tensor.dtype} {found}")


def start_tokens(generation_config: Any, batch_size: int, device: torch.device) -> torch.Tensor:
    """Return the decoder's start tokens, int64 [batch, 1]: `decoder_start_token_id` or `bos_token_id` of the model.

    Raises:
        InputError: If it has neither.
    """
    for name in ("decoder_start_token_id", "bos_token_id"):
        token = getattr(generation_config, name, None)
        if isinstance(token, int):
            return torch.full((batch_size, 1), token, dtype=torch.int64, device=device)
    raise InputError("the model has no decoder_start_token_id; pass the decoder's first tokens to generate")
