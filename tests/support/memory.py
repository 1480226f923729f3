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
