"""Give memory of the C library's heap back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back_heap() -> None:
    """Give free memory of the heap back to the system.

    glibc keeps it otherwise, if memory that is still in use lies above it. Nothing changes with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
