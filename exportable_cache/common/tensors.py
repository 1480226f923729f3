"""Helpers for tensors and their dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import InputError


def kind_of_tensor(tensor: torch.Tensor) -> list[str]:
    """Class, dtype, device, shape and strides.

    Of a quantised weight also what it is made of, and what its class keeps beside: the size of groups, say.
    """
    described = [str(tensor.dtype), str(tensor.device), str(tuple(tensor.shape)), str(tensor.stride())]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [type(tensor).__name__, *described]
    names, kept = flatten()
    parts = [(name, getattr(tensor, name)) for name in names]
    forms = [(name, str(part.dtype), part.shape, part.stride()) for name, part in parts if part is not None]
    return [type(tensor).__name__, repr(forms), repr(kept), *described]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A block that makes tensors which steps outside of `torch.inference_mode` can write, even if it is on here.

    Gradients stay off: to leave inference mode turns them on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


# Of a number of 32 bits, the half with the bits that float32 has and bfloat16 has not.
_LOWER = 0 if sys.byteorder == "little" else 1


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


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """The type that has each number of a float32 tensor without loss: bfloat16 or float16, as of a checkpoint that is
    stored so, or float32.
    """
    numbers = weight.detach().contiguous()
    if not numbers.view(torch.int16)[..., _LOWER::2].any():
        return torch.bfloat16
    return torch.float16 if torch.equal(numbers.half().float(), numbers) else torch.float32
