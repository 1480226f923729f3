"""Write and read what a `.pt2` file holds: uncompressed entries of a zip file at checked offsets, and tensors.

A tensor is an entry of raw bytes, with its dtype and shape in a table. Nothing is unpickled.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...errors import BundleError
from ...models.lora import LORA_TENSORS

#: Alignment of the data of an entry, so that tensors can be mapped.
_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP64_EXTRA = 20
#: Maximum bytes of a text entry. A graph of 100,000 nodes takes about 50 MB.
_LONGEST_TEXT = 1 << 30


class EntryWriter:
    """Writes entries into one folder, which torch's readers require.

    Args:
        path: Path of the file, which is replaced if it exists.
        folder: Name of the folder.
    """

    def __init__(self, path: Path, folder: str) -> None:
        self._file = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._folder = folder

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Add an entry.

        Raises:
            OSError: If the disk is full, or the file cannot be written.
        """
        info = zipfile.ZipInfo(f"{self._folder}/{name}", (1980, 1, 1, 0, 0, 0))
        assert self._file.fp is not None
        extra = _ZIP64_EXTRA if len(data) * 1.05 > zipfile.ZIP64_LIMIT else 0
        start = self._file.fp.tell() + _LOCAL_HEADER.size + len(info.filename.encode()) + extra + 4
        padding = -start % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self._file.writestr(info, bytes(data) if len(data) < 4096 else data)

    def __enter__(self) -> EntryWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._file.close()
            return
        # Ignore a second error, such as of a full disk, because the first one is raised.
        try:
            self._file.close()
        except OSError:
            pass


class EntryReader:
    """Reads entries of a file after all of them were checked.

    Args:
        path: Path of the file.
        is_known: Returns True if such a file may have an entry of this name, without the folder.

    Raises:
        BundleError: If an entry is compressed, encrypted, duplicate or unknown, is outside the file, or overlaps
            another one.
        OSError, zipfile.BadZipFile: If the file cannot be read.
    """

    def __init__(self, path: Path, is_known: Callable[[str], bool]) -> None:
        self._path = path
        size = path.stat().st_size
        self._file = path.open("rb")
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
            self._offsets = self._checked(infos, size, is_known)
        except BaseException:
            self._file.close()
            raise

    def _checked(
        self, infos: list[zipfile.ZipInfo], size: int, is_known: Callable[[str], bool]
    ) -> dict[str, tuple[int, int]]:
        offsets: dict[str, tuple[int, int]] = {}
        folder, slash, _ = infos[0].filename.partition("/") if infos else ("", "", "")
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            name = info.filename.removeprefix(f"{folder}/")
            if not slash or name == info.filename or name in offsets or not is_known(name):
                raise BundleError(
                    f"{self._path.name} holds {info.filename!r:.120}, which no program of ours has; "
                    "do not trust this file"
                )
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 or info.compress_size != info.file_size:
                raise BundleError(f"{name} in {self._path.name} is compressed or encrypted; export the model again")
            start = self._data_offset(info)
            if info.header_offset < end or start + info.file_size > size:
                raise BundleError(
                    f"{name} in {self._path.name} overlaps another entry or is outside the file; export the model again"
                )
            end = start + info.file_size
            offsets[name] = start, info.file_size
        return offsets

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) != _LOCAL_HEADER.size:
            raise zipfile.BadZipFile(f"no room for the header of {info.filename}")
        mark, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        if mark != b"PK\x03\x04" or self._file.read(name_length) != info.filename.encode():
            raise zipfile.BadZipFile(f"{info.filename} and its header differ")
        return info.header_offset + _LOCAL_HEADER.size + name_length + extra_length

    @property
    def names(self) -> list[str]:
        """Names of all entries."""
        return list(self._offsets)

    def size(self, name: str) -> int:
        """Return the size of an entry in bytes. Raises KeyError if it does not exist."""
        return self._offsets[name][1]

    def text(self, name: str) -> str:
        """Return the text of an entry in UTF-8. Raises KeyError if it does not exist."""
        start, size = self._offsets[name]
        if size > _LONGEST_TEXT:
            raise BundleError(f"{name} in {self._path.name} has {size} bytes, of at most {_LONGEST_TEXT}")
        self._file.seek(start)
        return self._file.read(size).decode()

    def bytes_of(self, name: str) -> torch.Tensor:
        """Return a copy of the bytes of an entry, uint8 [size]. Raises KeyError if it does not exist."""
        start, size = self._offsets[name]
        data = torch.empty(size, dtype=torch.uint8)
        if size:
            self._file.seek(start)
            if self._file.readinto(data.numpy().data) != size:
                raise OSError(f"{self._path} became shorter while it was read")
        return data

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


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
