"""Rounding of linear layers: of inputs to 8-bit integers, of inputs and weights to float8, of weights to NVFP4.

GPUs of SM 89 and later multiply float8 (e4m3). Weights have a scale per row. Inputs have one scale per layer, which is
measured once, because TensorRT stores the weights in 16 bits if the scale of the inputs is computed in every step.

NVFP4 has 4-bit floats (e2m1) in blocks of 16 inputs, a float8 scale for each block, and a float32 factor of all scales.
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
_SMALLEST = torch.finfo(FLOAT8).smallest_normal / 8
#: Values of 4-bit floats (e2m1) by their bits.
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LARGEST_FLOAT4 = 6.0
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


class FloatLinear(nn.Linear):
    """A linear layer whose weights are floats of few bits.

    Args:
        linear: The layer to replace.
        bits: uint8 [out_features, bytes of a row], the floats.
        scale: Their scales.
        dtype: Dtype of the computation.

    Attributes:
        bits: The floats.
        weight_scale: Their scales.
    """

    def __init__(self, linear: nn.Linear, bits: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits = nn.Parameter(bits, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self._shown = torch.empty(linear.weight.shape, dtype=dtype, device="meta")

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter of the layer that it replaces
        """Dtype and shape of the weight, without values, because Mamba and DeepSeek V3.2 cast inputs to its dtype."""
        return self._shown


class Float8Linear(FloatLinear):
    """A linear layer whose weights and inputs are rounded to float8.

    Args:
        linear: The layer to replace.
        largest: Largest magnitude of its inputs that was measured.
        dtype: Dtype of the computation and of the scales.

    Attributes:
        input_scale: Scale of the inputs, a power of two.
    """

    def __init__(self, linear: nn.Linear, largest: float, dtype: torch.dtype) -> None:
        super().__init__(linear, *_rounded_rows(linear.weight, dtype), dtype)
        self.input_scale = _power_of_two(_MARGIN * largest / _LARGEST)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of the rounded inputs [..., in_features] and weights, with the bias."""
        rounded = float8_rounded(input, self.input_scale)
        return functional.linear(rounded, float8_weight(self.bits, self.weight_scale), self.bias)


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


def float4_values(pairs: torch.Tensor) -> torch.Tensor:
    """Return the values of 4-bit floats, of which a byte has two, the first in the lower bits.

    Args:
        pairs: uint8 [..., columns / 2].

    Returns:
        float32 [..., columns].
    """
    values = torch.tensor(FLOAT4_VALUES, device=pairs.device)
    of_byte = torch.stack([values.repeat(len(values)), values.repeat_interleave(len(values))], dim=1)
    return functional.embedding(pairs.int(), of_byte).flatten(-2)


def dequantized_float4(pairs: torch.Tensor, scale: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Compute `float4_weight` for any number of dimensions before the rows, a few rows at a time."""
    result = pairs.new_empty(*pairs.shape[:-1], 2 * pairs.shape[-1], dtype=dtype)
    given = (one.flatten(0, -2).split(max(1, _ELEMENTS_AT_ONCE // result.shape[-1])) for one in (pairs, scale, result))
    for some, scales, into in zip(*given, strict=True):
        factors = (scales.view(FLOAT8).float() * factor).to(dtype).float()
        into.copy_((float4_values(some).unflatten(-1, (scale.shape[-1], -1)) * factors[..., None]).flatten(-2))
    return result


# The tag says that the result is random. It is not; it is the one way to keep torch_tensorrt from folding it.
@torch.library.custom_op("exportable_cache::float4_weight", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def float4_weight(pairs: torch.Tensor, scale: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in NVFP4 as floats.

    Args:
        pairs: uint8 [rows, columns / 2], see `float4_values`.
        scale: uint8 [rows, blocks], which are float8 values.
        factor: Factor of all scales, which float32 holds.
        dtype: Dtype of the result, to which the product of a scale and the factor is rounded, too.
    """
    return dequantized_float4(pairs, scale, factor, dtype)


@float4_weight.register_fake
def _(pairs: torch.Tensor, scale: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    return pairs.new_empty(pairs.shape[0], 2 * pairs.shape[1], dtype=dtype)


class Float4Linear(FloatLinear):
    """A linear layer whose weights are in NVFP4.

    Args:
        linear: The layer to replace.
        factor: Factor of all scales, see `float4_factor`.
        block: Weights of a row that share a scale.
        dtype: Dtype of the computation.

    Attributes:
        factor: Factor of all scales.
    """

    def __init__(self, linear: nn.Linear, factor: float, block: int, dtype: torch.dtype) -> None:
        super().__init__(linear, *rounded_blocks(linear.weight, factor, block), dtype)
        self.factor = factor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of the inputs [..., in_features] and the weights, with the bias."""
        weight = float4_weight(self.bits, self.weight_scale, self.factor, self.weight.dtype)
        return functional.linear(input, weight, self.bias)


def float4_factor(largest: float) -> float:
    """Return the factor with which the largest magnitude of a weight in NVFP4 has the largest scale."""
    return float8_factor(largest / _LARGEST_FLOAT4)


def float8_factor(largest: float) -> float:
    """Return the factor with which the largest magnitude is the largest of float8, rounded to float32."""
    factor = torch.tensor((largest or 1.0) / _LARGEST)
    return factor.clamp(min=torch.finfo(torch.float32).smallest_normal).item()


def float8_bits(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the float8 values of a weight divided by a factor, as uint8."""
    return (weight.detach().float() / factor).clamp(-_LARGEST, _LARGEST).to(FLOAT8).view(torch.uint8)


def rounded_blocks(weight: torch.Tensor, factor: float, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [rows, columns] to NVFP4.

    Args:
        weight: Floats of which `block` divides the columns.
        factor: See `float4_factor`.
        block: Weights of a row that share a scale.

    Returns:
        4-bit floats, uint8 [rows, columns / 2], see `float4_values`; float8 scales as uint8 [rows, blocks].
    """
    pairs, scales = [], []
    with one_thread():
        for rows in weight.detach().split(max(1, _ELEMENTS_AT_ONCE // weight.shape[1])):
            blocks = rows.float().unflatten(1, (-1, block))
            scale = (blocks.abs().amax(2) / _LARGEST_FLOAT4 / factor).clamp(_SMALLEST, _LARGEST).to(FLOAT8)
            first, second = _float4_bits(blocks / (scale.float() * factor)[..., None]).view(len(rows), -1, 2).unbind(2)
            pairs.append(first | second << 4)
            scales.append(scale.view(torch.uint8))
    return torch.cat(pairs), torch.cat(scales)


def _float4_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of the nearest 4-bit floats as uint8; of two equally near ones, those whose last bit is 0."""
    size = values.abs()
    # The steps are a half below 2, 1 below 4, and 2 from 4 on.
    above = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    bits = torch.where(size < 2, (2 * size).round(), above).clamp(max=7).to(torch.uint8)
    return bits | (values < 0).byte() << 3


def _power_of_two(value: float) -> float:
    """Return the smallest power of two that is at least `value`, within `_EXPONENTS`."""
    least, most = _EXPONENTS
    exponent = least if value <= 0 else math.ceil(math.log2(value))
    return 2.0 ** min(max(exponent, least), most)
