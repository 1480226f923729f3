"""Progress reports of long-running calls, and sizes as text: the library makes them, the command line draws them."""

from __future__ import annotations

from collections.abc import Callable

#: A callback `(stage, done, total)`, such as ("verifying", 3, 10); the total is None if unknown.
Progress = Callable[[str, int, "int | None"], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore a progress report."""


def bytes_text(count: int | None) -> str:
    """Return a size as text: `bytes_text(1536)` is `1.5 KiB`, None is `unknown`."""
    if count is None:
        return "unknown"
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
