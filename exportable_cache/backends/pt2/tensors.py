"""Write and read the tensors of a `.pt2` file: raw bytes, and a table of dtypes and shapes. Nothing is unpickled."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BundleError
from ...models.lora import LORA_TENSORS

if TYPE_CHECKING:
    from .entries import EntryReader, EntryWriter


#: Major version of the schema; another one may mean something else by the same fields.
SCHEMA_MAJOR = 8

DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

STRIDED = 7
LAYOUTS = {STRIDED: torch.strided}

MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}

#: Prefix of the names of cache tensors, which are written without contents and read as zeros.
STATE_PREFIX = "layers_"


def is_state(name: str) -> bool:
    """Return True for tensors that the program writes: those of the cache, and the slots for adapters."""
    return name.startswith(STATE_PREFIX) or name.rpartition(".")[2] in LORA_TENSORS


_RECORD = re.compile(r"(weight|tensor)_\d+")
#: The most elements that a tensor of zeros may have: 2^40, above every memory there is.
_MOST_ELEMENTS = 1 << 40
#: The most elements that a view may have of memory that holds fewer.
_MOST_VIEWED = 1 << 32


def check_view(sizes: Sequence[int], held: int) -> None:
    """Check that a view of `held` elements claims no more elements than a computer goes through in seconds.

    A view of one element can claim any number of them, and takes no memory for it.

    Raises:
        ValueError: If it claims more.
    """
    # Count a dimension of 0 as 1, because it would make the product 0 and strides are products of the others.
    if math.prod(max(size, 1) for size in sizes) > max(_MOST_VIEWED, held):
        raise ValueError(f"a view of {held} elements must have at most {_MOST_VIEWED}, got {list(sizes)!r:.80}")


class TensorWriter:
    """Writes tensors into one folder of an archive. A tensor with several names is written once.

    Args:
        entries: Writer of the archive.
        folder: Name of the folder, such as `data/weights`.
        prefix: Prefix of the records' names, such as `weight_`.
    """

    def __init__(self, entries: EntryWriter, folder: str, prefix: str) -> None:
        self._entries, self._folder, self._prefix = entries, folder, prefix
        self._records: dict[tuple, str] = {}
        # Kept alive, because the address of a freed tensor may be reused.
        self._kept: list[torch.Tensor] = []

    def table(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Write the tensors that are not written yet, and return the table of all in the format of torch's loader."""
        return {"config": {name: self._described(name, tensor) for name, tensor in tensors.items()}}

    def _described(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        plain = isinstance(tensor, torch.Tensor) and type(tensor.data) is torch.Tensor
        if not plain or tensor.layout is not torch.strided:
            raise BundleError(f"{name} is a {type(tensor).__name__}, which cannot be written without a pickle")
        is_written = is_state(name)
        sizes, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = (name,) if is_written else (tensor.data_ptr(), tensor.device, sizes, strides, dtype)
        if key not in self._records:
            self._records[key] = record = f"{self._prefix}{len(self._records)}"
            self._kept.append(tensor)
            self._entries.write(f"{self._folder}/{record}", b"" if is_written else _raw(tensor))
        return {
            "path_name": self._records[key],
            "is_param": isinstance(tensor, torch.nn.Parameter),
            "use_pickle": False,
            "tensor_meta": {
                "dtype": DTYPE_CODES[dtype],
                "sizes": [{"as_int": size} for size in sizes],
                "requires_grad": False,
                "device": {"type": "cpu", "index": None},
                "strides": [{"as_int": stride} for stride in strides],
                "storage_offset": {"as_int": 0},
                "layout": STRIDED,
            },
        }


def _raw(tensor: torch.Tensor) -> memoryview | bytes:
    """Return the bytes from a tensor's first element to its last."""
    tensor = tensor.detach()
    length = _span(tuple(tensor.shape), tensor.stride())
    if not length:
        return b""
    flat = tensor.as_strided((length,), (1,), tensor.storage_offset()).cpu()
    return flat.view(torch.uint8).numpy().data


def _span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


class TensorReader:
    """Reads tensors of one folder of an archive. Each record is read once and shared.

    Args:
        entries: Reader of the archive.
        folder: Name of the folder, such as `data/weights`.
        declared: Allowed names of tensors of zeros; any name if None.
    """

    def __init__(self, entries: EntryReader, folder: str, declared: Collection[str] | None = None) -> None:
        self._entries, self._folder, self._declared = entries, folder, declared
        self._read: dict[tuple, torch.Tensor] = {}

    def tensors(self, table: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a table by name.

        Raises:
            BundleError: If a tensor is pickled, or does not match its bytes.
            KeyError, TypeError, ValueError: If the table is malformed.
        """
        return {name: self._tensor(name, described) for name, described in table["config"].items()}

    def _tensor(self, name: str, described: Mapping[str, Any]) -> torch.Tensor:
        record, meta = described["path_name"], described["tensor_meta"]
        if described["use_pickle"] is not False or not _RECORD.fullmatch(record):
            raise BundleError(
                f"{name!r:.80} is not kept as raw bytes; pickled tensors run code, so they are not read: "
                "do not trust this file"
            )
        dtype = DTYPES[meta["dtype"]]
        sizes, strides = (tuple(_count(one["as_int"]) for one in meta[field]) for field in ("sizes", "strides"))
        if meta["layout"] != STRIDED or meta["storage_offset"] != {"as_int": 0} or meta["device"]["type"] != "cpu":
            raise ValueError(f"{name} is not a plain tensor from its record's start")
        key = (record, dtype, sizes, strides)
        if key not in self._read:
            self._read[key] = self._made(name, f"{self._folder}/{record}", dtype, sizes, strides)
        return self._read[key]

    def _made(
        self, name: str, path: str, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        length, held = _span(sizes, strides), self._entries.size(path)
        if is_state(name) and held == 0 and math.prod(sizes) <= _MOST_ELEMENTS:
            if self._declared is not None and name not in self._declared:
                raise BundleError(f"{name!r:.80} is a tensor of the cache that the manifest does not list")
            return torch.zeros(sizes, dtype=dtype)
        if length * dtype.itemsize != held:
            raise BundleError(f"{name!r:.80} takes {length * dtype.itemsize} bytes, its record has {held}")
        check_view(sizes, length)
        data = self._entries.bytes_of(path)
        # A bool of another byte counts as that many elements in some kernels, which write past their results then.
        if dtype is torch.bool and data.numel() and int(data.max()) > 1:
            raise ValueError(f"{name!r:.80} is of bools and must have bytes of 0 and 1, got {int(data.max())}")
        return data.view(dtype).as_strided(sizes, strides)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a size must be an int of at least 0, got {value!r:.40}")
    return value
