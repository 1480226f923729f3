"""How long-running calls report what they do. The library calls it; the command line draws it."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the stage ("verifying"), how much of it is done, and the total, or None where that is unknown.
Progress = Callable[[str, int, "int | None"], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing."""
