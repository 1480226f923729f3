"""Memory that mapped files take."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def give_back_pages(path: Path) -> None:
    """Let go of the pages of a file that this process maps, locked ones too: what is used of them is read again.

    On Linux; elsewhere, or where the system refuses it, nothing changes. What can be written to is left alone.
    """
    if not _MAPS.is_file():
        return
    library = ctypes.CDLL(None)
    mapped = str(path.resolve())
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        place, access, *_, name = line.split(maxsplit=5)
        if name != mapped or "w" in access:
            continue
        start, end = (int(address, 16) for address in place.split("-"))
        arguments = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        library.munlock(*arguments)
        library.madvise(*arguments, mmap.MADV_DONTNEED)
