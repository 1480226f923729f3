"""The zip file under a `.pt2`: entries side by side, uncompressed, read by offsets that were checked first."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from ...errors import BundleError

#: Where the data of an entry begins, so that tensors can be mapped.
_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP64_EXTRA = 20
#: The most that a text entry may hold: a graph of 100,000 nodes takes about 50 MB.
_LONGEST_TEXT = 1 << 30


class EntryWriter:
    """Writes entries under one folder, as torch's own readers want it.

    Args:
        path: The file, new or replaced.
        folder: That every entry is in.
    """

    def __init__(self, path: Path, folder: str) -> None:
        self._file = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._folder = folder

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Add an entry.

        Raises:
            OSError: If there is no room left, or the file cannot be written.
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
        # Its end cannot be written on a full disk either, and what failed first is what is told.
        try:
            self._file.close()
        except OSError:
            pass


class EntryReader:
    """Reads entries of a file that is checked whole before any is read.

    Args:
        path: The file.
        is_known: Whether an entry of this name, without its folder, belongs in such a file.

    Raises:
        BundleError: If an entry is compressed or encrypted, lies outside the file or on another one, is there twice, or
            is not a known one.
        OSError, zipfile.BadZipFile: If the file cannot be read.
    """

    def __init__(self, path: Path, is_known: Callable[[str], bool]) -> None:
        self._path = path
        size = path.stat().st_size
        self._file = path.open("rb")
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos = archive.infolist()
            self._places = self._checked(infos, size, is_known)
        except BaseException:
            self._file.close()
            raise

    def _checked(
        self, infos: list[zipfile.ZipInfo], size: int, is_known: Callable[[str], bool]
    ) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        folder, slash, _ = infos[0].filename.partition("/") if infos else ("", "", "")
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            name = info.filename.removeprefix(f"{folder}/")
            if not slash or name == info.filename or name in places or not is_known(name):
                raise BundleError(
                    f"{self._path.name} holds {info.filename!r:.120}, which no program of ours has; "
                    "do not trust this file"
                )
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 or info.compress_size != info.file_size:
                raise BundleError(f"{name} in {self._path.name} is compressed or encrypted; export the model again")
            start = self._data_offset(info)
            if info.header_offset < end or start + info.file_size > size:
                raise BundleError(f"{name} in {self._path.name} lies on another entry, or outside; export again")
            end = start + info.file_size
            places[name] = start, info.file_size
        return places

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
        """Of all entries."""
        return list(self._places)

    def size(self, name: str) -> int:
        """Bytes of an entry. Raises KeyError if there is none of that name."""
        return self._places[name][1]

    def text(self, name: str) -> str:
        """An entry in UTF-8. Raises KeyError if there is none of that name."""
        start, size = self._places[name]
        if size > _LONGEST_TEXT:
            raise BundleError(f"{name} in {self._path.name} has {size} bytes, of at most {_LONGEST_TEXT}")
        self._file.seek(start)
        return self._file.read(size).decode()

    def bytes_of(self, name: str) -> torch.Tensor:
        """The bytes of an entry, uint8 [size], in memory of their own. Raises KeyError if there is none."""
        start, size = self._places[name]
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
