"""Dtypes by name."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
