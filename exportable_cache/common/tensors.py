"""Tensors: their dtypes and kinds, and the names, dtypes and sizes of the inputs and outputs of methods."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from torch import nn


def kind_of_tensor(tensor: torch.Tensor) -> list[str]:
    """Return class, dtype, device, shape and strides of a tensor, as strings.

    For a quantized weight, also describe its inner tensors and its metadata, such as the group size.
    """
    described = [str(tensor.dtype), str(tensor.device), str(tuple(tensor.shape)), str(tensor.stride())]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [type(tensor).__name__, *described]
    names, kept = flatten()
    parts = [(name, getattr(tensor, name)) for name in names]
    forms = [(name, str(part.dtype), part.shape, part.stride()) for name, part in parts if part is not None]
    return [type(tensor).__name__, repr(forms), repr(kept), *described]


def logit_differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the differences of logits in float32; 0 where both are minus infinity, as for tokens that are left out."""
    absent = found.isneginf() & expected.isneginf()
    return (found.float() - expected.float()).masked_fill(absent, 0.0)


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that can be written outside `torch.inference_mode`, even if it is on here.

    Gradients stay off, because leaving inference mode would turn them on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


# Index of the int16 half of a float32 that bfloat16 drops.
_LOWER = 0 if sys.byteorder == "little" else 1


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating dtype from a dtype or its name; None and "auto" mean the stored dtype and give None.

    Raises:
        InputError: If it is not a floating dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    parsed = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise InputError(f"dtype must be 'float32', 'float16', 'bfloat16', or None for the stored dtype, got {dtype!r}")
    return parsed


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the smallest of bfloat16, float16 and float32 that holds every value of a float32 tensor exactly."""
    numbers = weight.detach().contiguous()
    if not numbers.view(torch.int16)[..., _LOWER::2].any():
        return torch.bfloat16
    return torch.float16 if torch.equal(numbers.half().float(), numbers) else torch.float32


def wide_buffer(module: torch.nn.Module) -> str | None:
    """Return the name of a buffer of integers that 32 bits do not hold, or None if a module has none."""
    for name, buffer in module.named_buffers():
        if buffer.dtype == torch.int64 and buffer.numel() and not torch.equal(buffer.to(torch.int32).long(), buffer):
            return name
    return None


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a method: `TensorSpec("input_ids", "int64", ("batch", "length"))`.

    Attributes:
        name: Name of the argument.
        dtype: Name of a torch dtype.
        shape: Sizes, as numbers or names. "batch" is the program's batch size, "length" has the method's range, and
            other names have the range in `ProgramMethod.ranges`.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of inputs like a tensor, all of whose sizes are fixed."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def sizes(self, named: Mapping[str, int]) -> list[int]:
        """Return the shape with each name replaced by its number."""
        return [named[size] if isinstance(size, str) else size for size in self.shape]


def name_forward(module: nn.Module, names: Sequence[str]) -> None:
    """Give `module` a `forward(*names)` that passes its arguments by name to `module.call`.

    The tracer names a graph's inputs after the parameters of `forward`.
    """
    namespace: dict[str, FunctionType] = {}
    passed = ", ".join(f"{name}={name}" for name in names)
    exec(f"def forward(self, {', '.join(names)}):\n    return self.call({passed})\n", namespace)
    module.forward = MethodType(namespace["forward"], module)
