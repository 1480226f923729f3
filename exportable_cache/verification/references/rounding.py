"""The reference for 8-bit caches: transformers' own cache, fed keys and values that were rounded to 8 bits and back."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ...cache.layers.quantized import dequantize_rows, quantize_rows


class RoundingCache(DynamicCache):
    """A `DynamicCache` whose keys and values went through `quantize_rows`: what an 8-bit cache of any layout holds."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., dim] as an 8-bit layer gives them out."""
    return dequantize_rows(*quantize_rows(rows), rows.dtype)
