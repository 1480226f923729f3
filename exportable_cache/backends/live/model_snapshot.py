"""Pickle a model and its cache without the values of large tensors, for the process that compiles them."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch

#: Bytes up to which a tensor is written with its values, because traced code may read those of small ones.
_LARGEST_WITH_VALUES = 2**16


def snapshot(value: Any, written: Iterable[torch.Tensor] = ()) -> bytes:
    """Pickle an object; large tensors become shape, strides and dtype.

    Args:
        value: The object.
        written: Tensors that steps write.

    Raises:
        Exception: Any error of pickling, such as for a tensor of a class that is neither torch's nor torchao's.
    """
    file = io.BytesIO()
    _Writer(file, written).dump(value)
    if b"__main__" in file.getvalue():
        raise pickle.PicklingError(
            "a part of it is defined in the running script or notebook, which another process cannot import"
        )
    return file.getvalue()


def from_snapshot(written: bytes) -> Any:
    """Return the object of a snapshot, with large tensors that are allocated but not filled.

    On a CPU they use no physical memory. On a GPU all that steps only read share the memory of the largest, because the
    process that runs the steps needs the rest.
    """
    return _Reader(io.BytesIO(written)).load()


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, written: Iterable[torch.Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        # Kept alive, like the tensors below.
        self._written = {id(tensor): tensor for tensor in written}
        # Keep the tensors alive, because an id may be reused after its object is freed.
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
            # Raw bytes, because pickling by torch takes a millisecond per tensor.
            values = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        index, _ = self._tensors.setdefault(id(value), (len(self._tensors), value))
        kind = type(value) is torch.nn.Parameter
        is_written = id(value) in self._written
        described = (value.shape, value.stride(), value.dtype, value.device)
        return index, kind, is_written, described, value.requires_grad, values

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MethodType) and isinstance(value.__func__, functools.partial):
            # torchao sets a layer's `extra_repr` to a bound partial, which pickle cannot write by name.
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
    """Return True for a quantized weight of torchao, which consists of plain tensors."""
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
        self._shared: dict[torch.device, torch.UntypedStorage] = {}

    def persistent_load(self, described: Any) -> torch.Tensor:
        index, is_parameter, is_written, (shape, stride, dtype, device), requires_grad, values = described
        if index not in self._tensors:
            if not is_written and not values and device.type != "cpu":
                tensor = self._over_shared(shape, stride, dtype, device)
            else:
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if values:
                tensor.copy_(torch.frombuffer(bytearray(values), dtype=dtype).view(shape))
            if is_parameter:
                tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
            self._tensors[index] = tensor
        return self._tensors[index]

    def _over_shared(self, shape: torch.Size, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor over the memory that such tensors share, which grows to the largest of them."""
        storage = self._shared.setdefault(device, torch.UntypedStorage(0, device=device))
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if storage.nbytes() < extent * dtype.itemsize:
            storage.resize_(extent * dtype.itemsize)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, stride)
