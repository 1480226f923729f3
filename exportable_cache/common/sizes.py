"""Sizes as text, for tables and messages."""

from __future__ import annotations


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
