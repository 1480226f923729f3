"""Waits for conditions, instead of a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 600) -> None:
    """Return as soon as a condition holds.

    Raises:
        AssertionError: If it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds:g} s"
        time.sleep(0.01)


def process_state(pid: int) -> str:
    """Return the state of a process from Linux's /proc: "S" waits, "T" is stopped, "X" has ended or is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
