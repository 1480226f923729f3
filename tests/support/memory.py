"""Memory of this process."""

from __future__ import annotations

from pathlib import Path

import pytest


def resident_kib() -> int:
    """Memory resident now, in KiB: a peak would hide growth below what earlier tests took."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory is read from /proc, which this system does not have")
    return int(status.read_text().partition("VmRSS:")[2].split()[0])


def of_file(path: Path, field: str) -> int:
    """Bytes of this process's mappings of a file, by a field of Linux's `smaps`: `Size`, `Rss`, `Locked`."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            ours = rest[-1] == str(path)
        elif ours and name == f"{field}:":
            found += int(rest[0]) * 1024
    return found
