"""What verification feeds an encoder-decoder, and the model's own answers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, EncoderDecoderCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...program.methods import ProgramMethod


def random_inputs(
    method: ProgramMethod, length: int, batch_size: int, vocab_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Inputs of `encode`, `length` long where that is free, without padding."""
    inputs = {}
    for spec in method.inputs:
        shape = spec.sizes({"batch": batch_size, "length": length})
        if spec.name == "attention_mask":
            inputs[spec.name] = torch.ones(shape, dtype=torch.int64)
        elif spec.dtype == "int64":
            inputs[spec.name] = torch.randint(vocab_size, shape, generator=generator)
        else:
            inputs[spec.name] = torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype))
        if spec.name == "flattened_patches":
            # Row and column of each patch, from 1 on, come before its content.
            inputs[spec.name][..., :2] = torch.arange(1, length + 1).to(inputs[spec.name].dtype)[:, None]
    return inputs


def encoder_lengths(method: ProgramMethod) -> list[int]:
    """Lengths to try: the longest, a short one, and one between."""
    least, most = method.min_length, method.max_length
    lengths = {most, min(most, least + 2 * method.multiple), (least + most) // 2}
    if method.pads:
        return sorted({length - 1 for length in lengths}, reverse=True)
    return sorted({length - length % method.multiple for length in lengths}, reverse=True)


def decoder_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The eager model over `inputs` with transformers' own cache: ids [batch, length] to logits [batch, vocab] of the
    last.

    To be called with no gradients, under the model's own attention.
    """
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    common = {
        "encoder_outputs": model.get_encoder()(**inputs),
        "past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        **{name: tensor for name, tensor in inputs.items() if name == "attention_mask"},
    }
    return lambda ids: model(decoder_input_ids=ids, use_cache=True, **common).logits[:, -1]
