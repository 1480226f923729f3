"""A setting of the whole process that blocks of several threads change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ProcessSetting(Generic[Value]):
    """Changed by the first of the blocks that run at a time, and put back by the last one.

    A block that put back what it found would, where it began in another thread's block and outlasts that one, leave the
    change for good.

    Args:
        get: Gives the setting.
        set: Sets it.
    """

    def __init__(self, get: Callable[[], Value], set: Callable[[Value], object]) -> None:
        self._get, self._set = get, set
        self._lock = threading.Lock()
        self._blocks = 0

    @contextmanager
    def during(self, chosen: Callable[[Value], Value]) -> Iterator[None]:
        """A block with another setting.

        Args:
            chosen: Makes it from the one that is found. Not asked where another block has made the change.
        """
        with self._lock:
            if not self._blocks:
                self._before = self._get()
                self._set(chosen(self._before))
                self._changed = self._get()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                # Whoever has set it since wants that one.
                if not self._blocks and self._get() == self._changed:
                    self._set(self._before)
