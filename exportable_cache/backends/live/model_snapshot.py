"""A model and its cache as bytes, without the values of large tensors: what another process compiles for them."""

from __future__ import annotations

import functools
import io
import pickle
from types import MethodType
from typing import Any

import torch

#: Values of smaller tensors go along: rotary frequencies and the like, which traced code may look at.
_LARGEST_WITH_VALUES = 2**16


def skeleton(value: Any) -> bytes:
    """An object pickled, large tensors by shape, strides and dtype only.

    Raises:
        Exception: What pickling raises, under any name: part of it cannot be written, or is a tensor of another class
            than torch's and torchao's.
    """
    written = io.BytesIO()
    _Writer(written).dump(value)
    if b"__main__" in written.getvalue():
        raise pickle.PicklingError(
            "part of it is defined in the script or notebook that runs, which others cannot import"
        )
    return written.getvalue()


def from_skeleton(written: bytes) -> Any:
    """The object, its large tensors allocated and not filled: untouched memory costs nothing."""
    return _Reader(io.BytesIO(written)).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        # Kept, as a number is the identity of its object as long as that is there.
        self._tensors: dict[int, tuple[int, torch.Tensor]] = {}

    def persistent_id(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if _is_made_of_tensors(value):
            return None
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise pickle.PicklingError(f"a tensor of class {type(value).__name__}")
        values = None
        if value.numel() * value.element_size() <= _LARGEST_WITH_VALUES:
            # torch's own way takes a millisecond a tensor.
            values = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        number, _ = self._tensors.setdefault(id(value), (len(self._tensors), value))
        kind = type(value) is torch.nn.Parameter
        return number, kind, value.shape, value.stride(), value.dtype, value.device, value.requires_grad, values

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType) and isinstance(value.__func__, functools.partial):
            # torchao's `extra_repr` of a layer: a method is pickled by its name, and this one has none.
            return _bound, (value.__func__, value.__self__)
        if not isinstance(value, torch.Tensor) or not _is_made_of_tensors(value):
            return NotImplemented
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(value, name) for name in names}
        is_parameter = isinstance(value, torch.nn.Parameter)
        return _rebuilt, (type(value), parts, context, value.shape, value.stride(), is_parameter)


def _bound(function: Any, owner: Any) -> Any:
    return MethodType(function, owner)


def _is_made_of_tensors(value: torch.Tensor) -> bool:
    """Whether it is one of torchao's quantised weights, as numbers and scales in ordinary tensors."""
    return type(value).__module__.startswith("torchao.") and hasattr(value, "__tensor_unflatten__")


def _rebuilt(
    kind: Any, parts: dict[str, torch.Tensor], context: Any, shape: torch.Size, stride: Any, is_parameter: bool
) -> torch.Tensor:
    tensor = kind.__tensor_unflatten__(parts, context, shape, stride)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, described: Any) -> torch.Tensor:
        number, is_parameter, shape, stride, dtype, device, requires_grad, values = described
        if number not in self._tensors:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if values:
                tensor.copy_(torch.frombuffer(bytearray(values), dtype=dtype).view(shape))
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
            self._tensors[number] = tensor
        return self._tensors[number]
