"""Write and read the zip file of a `.pt2`: uncompressed entries at checked offsets."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from ...errors import BundleError

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
