"""Storages: which tensors keep the keys and values of a slot, and how rows go in and come out."""

from __future__ import annotations

import torch

from ...errors import InputError
from .float import FloatStorage
from .int4 import Int4Storage
from .int8 import Int8Storage
from .rounded import RoundedStorage
from .storage import Part, Storage

__all__ = [
    "KV_DTYPES",
    "FloatStorage",
    "Int4Storage",
    "Int8Storage",
    "Part",
    "RoundedStorage",
    "Storage",
    "check_kv_dtype",
    "storage_of",
]

#: What `kv_dtype` may be, besides None for the dtype that the model writes.
KV_DTYPES = tuple(kind for kind, storage in Storage.kinds.items() if storage.rounds)


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Refuse a dtype that no storage has.

    Raises:
        InputError: If it is neither None nor one of `KV_DTYPES`.
    """
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise InputError(
            f"kv_dtype is {kv_dtype!r}; it must be {' or '.join(KV_DTYPES)}, or None for the dtype the model writes"
        )


def storage_of(dtype: torch.dtype, kv_dtype: str | None = None) -> Storage:
    """The storage for keys and values of `dtype` that are kept in `kv_dtype`.

    Raises:
        InputError: If `dtype` is no floating one, or there is no such storage.
    """
    check_kv_dtype(kv_dtype)
    return (FloatStorage if kv_dtype is None else Storage.kinds[kv_dtype]).of(dtype)
