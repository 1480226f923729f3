"""Rounding of the inputs of linear layers: to 8-bit integers, as torchao does, and to float8 (e4m3) with the weights.

GPUs of SM 89 and later multiply float8. Weights have a scale per row. Inputs have one scale per layer, which is
measured once, because TensorRT stores the weights in 16 bits if the scale of the inputs is computed in every step.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ..common.process.tuning import one_thread

# Activations rounded at once: few enough to stay in the cache over several passes.
_ACTIVATIONS_AT_ONCE = 1 << 17


def rounded_activations(source: torch.Tensor) -> torch.Tensor:
    """Round activations, float32 [..., features], to 8 bits with a scale and zero point per token, and back.

    The result is what torchao's layers with `INT8_ASYM_PER_TOKEN` multiply by.
    """
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    least, most = torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max
    features = source.shape[-1]
    parts = []
    for tokens in source.reshape(-1, features).split(max(1, _ACTIVATIONS_AT_ONCE // features)):
        scale, zero_point = choose_qparams_affine(
            tokens,
            MappingType.ASYMMETRIC,
            (1, features),
            torch.int8,
            quant_min=least,
            quant_max=most,
            zero_point_dtype=torch.int8,
        )
        integers = quantize_affine(
            tokens, (1, features), scale, zero_point, output_dtype=torch.int8, quant_min=least, quant_max=most
        )
        parts.append(
            dequantize_affine(
                integers, (1, features), scale, zero_point, torch.int8, least, most, output_dtype=tokens.dtype
            )
        )
    return torch.cat(parts).view(source.shape)


FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
#: Inputs may be this many times as large as those that were measured. It costs no precision, because values far below
#: the largest keep their bits.
_MARGIN = 4.0
#: Smallest and largest exponent of a scale of inputs, so that float16 holds it.
_EXPONENTS = -14, 15
# Weights converted at once, so that their float32 values stay in the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 17


# The tag says that the result is random. It is not; it is the one way to keep torch_tensorrt from folding it.
@torch.library.custom_op("exportable_cache::float8_weight", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def float8_weight(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight from its float8 values.

    Args:
        bits: uint8 [rows, columns], which are float8 values.
        scale: [rows], of the result's dtype.
    """
    return (bits.view(FLOAT8).float() * scale.float()[:, None]).to(scale.dtype)


@float8_weight.register_fake
def _(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return bits.new_empty(bits.shape, dtype=scale.dtype)


@torch.library.custom_op("exportable_cache::float8_rounded", mutates_args=())
def float8_rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return values rounded to float8 at a scale that is a power of two; larger ones than it holds become its largest.

    Args:
        x: Any float dtype.
        scale: Divisor of the values before they are rounded.
    """
    scaled = (x.float() / scale).clamp(-_LARGEST, _LARGEST)
    return (scaled.to(FLOAT8).float() * scale).to(x.dtype)


@float8_rounded.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


#: The operator as modes see its calls.
FLOAT8_ROUNDED = torch.ops.exportable_cache.float8_rounded.default


class Float8Linear(nn.Linear):
    """A linear layer whose weights and inputs are rounded to float8.

    Args:
        linear: The layer to replace.
        largest: Largest magnitude of its inputs that was measured.
        dtype: Dtype of the computation and of the scales.

    Attributes:
        weight: uint8 [out_features, in_features], which are float8 values.
        weight_scale: [out_features].
        input_scale: Scale of the inputs, a power of two.
    """

    def __init__(self, linear: nn.Linear, largest: float, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bits, scale = _rounded_rows(linear.weight, dtype)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.input_scale = _power_of_two(_MARGIN * largest / _LARGEST)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of the rounded inputs [..., in_features] and weights, with the bias."""
        rounded = float8_rounded(input, self.input_scale)
        return functional.linear(rounded, float8_weight(self.weight, self.weight_scale), self.bias)


def _rounded_rows(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float8 values of a weight as uint8, and the scale of each row."""
    bits, scales = [], []
    with one_thread():
        for rows in weight.detach().split(max(1, _ELEMENTS_AT_ONCE // weight.shape[1])):
            values = rows.float()
            scale = (values.abs().amax(1) / _LARGEST).clamp(min=torch.finfo(dtype).smallest_normal).to(dtype)
            scaled = (values / scale.float()[:, None]).clamp(-_LARGEST, _LARGEST)
            bits.append(scaled.to(FLOAT8).view(torch.uint8))
            scales.append(scale)
    return torch.cat(bits), torch.cat(scales)


def _power_of_two(value: float) -> float:
    """Return the smallest power of two that is at least `value`, within `_EXPONENTS`."""
    least, most = _EXPONENTS
    exponent = least if value <= 0 else math.ceil(math.log2(value))
    return 2.0 ** min(max(exponent, least), most)
