"""The method that runs the encoder of an encoder-decoder model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ...common.named_forward import name_forward
from ...common.tensor_spec import TensorSpec
from ...models.encoder import ENCODER_LENGTH, run_encoder
from ..methods import ProgramMethod

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ...models.encoder import Encoder


def encode_method(encoder: Encoder) -> ProgramMethod:
    """`encode`: input and mask to hidden states and the number of real ones per row."""
    mask = (TensorSpec("attention_mask", "int64", ("batch", "length")),) if encoder.takes_mask else ()
    hidden, lengths = encoder.outputs
    # How long the output is follows from the input, so it is no size of its own here.
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
    """The method `encode`."""

    def __init__(self, model: PreTrainedModel, encoder: Encoder) -> None:
        super().__init__()
        # All of it: programs that are packaged together share weights by their names in the whole model.
        self.model = model
        name_forward(self, encode_method(encoder).input_names)

    def call(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `run_encoder`."""
        return run_encoder(self.model, **inputs)
