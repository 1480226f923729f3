"""What an ELF file says of itself: the processor it is for, and the libraries it loads."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS = 1, 5


@dataclass(frozen=True)
class Program:
    """A program or library: `Program(62, ("libc.so.6",))`.

    Attributes:
        machine: The number of its processor, `e_machine` of the ELF specification.
        libraries: Names of those that it asks the loader for, none for a static program.
    """

    machine: int
    libraries: tuple[str, ...]


def read_program(path: Path) -> Program:
    """Read the headers of a 64-bit little-endian ELF file.

    Raises:
        InputError: If it cannot be read, or is another kind of file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the program {path}: {error.strerror}; name the file that CMake built") from error
    if content[:6] != b"\x7fELF\x02\x01":
        raise InputError(f"{path} is no 64-bit ELF program; name the file that CMake built for the device")
    try:
        return Program(*_read(content))
    except (struct.error, ValueError, OverflowError) as error:
        raise InputError(f"{path} is a damaged ELF file ({error}); build it again") from error


def _read(content: bytes) -> tuple[int, tuple[str, ...]]:
    machine = struct.unpack_from("<H", content, 18)[0]
    (offset,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    # Type, flags, place in the file, address, physical address, bytes in the file, bytes in memory, alignment.
    segments = [struct.unpack_from("<IIQQQQQQ", content, offset + size * index) for index in range(count)]
    entries: list[tuple[int, int]] = []
    for segment in segments:
        if segment[0] == _DYNAMIC:
            table = content[segment[2] : segment[2] + segment[5]]
            entries += struct.iter_unpack("<QQ", table[: len(table) // 16 * 16])
    names = [value for tag, value in entries if tag == _NEEDED]
    if not names:
        return machine, ()
    strings = next((value for tag, value in entries if tag == _STRINGS), None)
    within = [
        one for one in segments if one[0] == _LOAD and strings is not None and one[3] <= strings < one[3] + one[5]
    ]
    if not within:
        raise ValueError("its table of names lies nowhere in it")
    start = within[0][2] + strings - within[0][3]
    return machine, tuple(content[start + name : content.index(0, start + name)].decode() for name in names)
