"""Storages: the tensors that keep the keys and values of a slot, and how rows are encoded and decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.settings import check_choice
from ..spec import KV_DTYPES
from .float import BFloat16Storage, Float16Storage, FloatStorage, HalfStorage
from .rounded import Int4Storage, Int8Storage, RoundedStorage
from .storage import Part, Storage

if TYPE_CHECKING:
    import torch

__all__ = [
    "KV_DTYPES",
    "BFloat16Storage",
    "Float16Storage",
    "FloatStorage",
    "HalfStorage",
    "Int4Storage",
    "Int8Storage",
    "Part",
    "RoundedStorage",
    "Storage",
    "storage_of",
]


def storage_of(dtype: torch.dtype, kv_dtype: str | None = None) -> Storage:
    """Return the storage for keys and values of `dtype` that are kept in `kv_dtype`, or unchanged without one.

    Raises:
        InputError: If `dtype` is not a floating dtype, or `kv_dtype` is unknown.
    """
    if kv_dtype is not None:
        check_choice("kv_dtype", kv_dtype, KV_DTYPES, optional=True)
    if kv_dtype is None or str(dtype) == f"torch.{kv_dtype}":
        return FloatStorage.of(dtype)
    return Storage.kinds[kv_dtype].of(dtype)
