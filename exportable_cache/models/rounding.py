"""Rounding of activations to 8 bits, as torchao's layers with quantised activations do."""

from __future__ import annotations

import torch

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
