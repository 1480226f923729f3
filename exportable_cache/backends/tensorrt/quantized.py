"""Quantised weights for TensorRT: integers with scales, which a DEQUANTIZE layer converts before each product.

A quantised model is exported as `torchao::dequantize_affine` of integers before a plain operator. torch_tensorrt would
compute it once and store float weights, so it becomes an operator that constant folding leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...models.experts import experts_of, projections
from ...models.quantized_rows import has_quantized_weights, rounds_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Largest integers of 4 and 8 bits, and their bits.
_BITS = {7: 4, 127: 8}


@torch.library.custom_op(
    "exportable_cache::dequantized_weight", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dequantized_weight(
    integers: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return a weight from its integers.

    The tag says that the result is random. It is not; it is the one way to keep torch_tensorrt from folding it.

    Args:
        integers: int8 [rows, columns].
        scale: [rows, groups], of the result's dtype.
        zero_point: int8 [rows, groups], all zero.
        bits: 4 if the integers are from -8 to 7, else 8.
    """
    rows, columns = integers.shape
    return (integers.view(rows, scale.shape[1], -1) * scale[..., None]).view(rows, columns)


@dequantized_weight.register_fake
def _(integers: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    return integers.new_empty(integers.shape, dtype=scale.dtype)


def dequantize_affine(
    integers: torch.Tensor,
    block_size: Sequence[int],
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    input_dtype: torch.dtype,
    least: int,
    most: int,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decompose `torchao::dequantize_affine` of a weight into an operator that constant folding leaves alone."""
    is_weight = integers.dim() == 2 and block_size[0] == 1 and zero_point is not None and most in _BITS
    if not is_weight or output_dtype != scale.dtype:
        return NotImplemented
    rows = integers.shape[0]
    return dequantized_weight(integers, scale.reshape(rows, -1), zero_point.reshape(rows, -1), _BITS[int(most)])


def packed(integers: torch.Tensor) -> torch.Tensor:
    """Return 4-bit integers as bytes of two: the first in the lower bits, as TensorRT reads them.

    Args:
        integers: int8 of an even number of elements, from -8 to 7.
    """
    pairs = integers.reshape(-1, 2).to(torch.int16) & 0xF
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Return the int8 integers that `packed` stored."""
    values = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).reshape(-1).to(torch.int8)
    return torch.where(values > 7, values - 16, values)


def check_weights(model: PreTrainedModel) -> None:
    """Refuse a quantised mixture whose experts, most of its weights, stay in float, and layers that round inputs.

    Raises:
        UnsupportedModelError: If other layers are quantised, and the experts are not; or if a layer rounds its inputs
            to 8 bits, as a head does that is tied to a table which alone is quantised.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and rounds_activations(module.weight):
            raise UnsupportedModelError(
                f"{path} of {type(model).__name__} must not round its inputs to 8 bits for target tensorrt, as a head "
                "does that is tied to a quantised table; pass quantize='8w' (--quantize 8w), too, or leave "
                "quantize_embeddings out"
            )
    floats = (path for path, one in experts_of(model) if getattr(one, projections(one)[1]).is_floating_point())
    path = next(floats, None)
    if path is not None and has_quantized_weights(model):
        raise UnsupportedModelError(
            f"the experts of {type(model).__name__} ({path}) must be quantised like other layers for target tensorrt, "
            "because they are most of its weights, got floats; use quantize='4w', '8w', 'fp8' or 'nvfp4', or leave "
            "quantize out"
        )


def kept_scale(scale: torch.Tensor, zero_point: torch.Tensor, where: str) -> torch.Tensor:
    """Return the scale of a weight, after checking that its zero points are zero, as TensorRT requires.

    Raises:
        UnsupportedModelError: If a zero point is not zero.
    """
    if bool(zero_point.any()):
        raise UnsupportedModelError(
            f"the zero points of {where} must be zero, because TensorRT has symmetric quantisation only; quantise it "
            "with this package (--quantize)"
        )
    return scale
