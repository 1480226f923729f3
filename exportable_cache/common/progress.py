"""Progress reports of long-running calls: the library makes them, the command line draws them."""

from __future__ import annotations

from collections.abc import Callable

#: A callback `(stage, done, total)`, such as ("verifying", 3, 10); the total is None if unknown.
Progress = Callable[[str, int, "int | None"], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore a progress report."""
