"""Floating dtypes and their names."""

from __future__ import annotations

import torch

from ..errors import InputError


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype from itself or its name; None and "auto" stand for the stored one.

    Raises:
        InputError: If it is no floating dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise InputError(
            f"dtype is {dtype!r}; pass one of 'float32', 'float16', 'bfloat16', or None for the stored one"
        )
    return parsed


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
