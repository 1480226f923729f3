"""A thread that loads graphs is throttled while a step of few tokens runs: the two share Python's interpreter.

A step as it is gives the interpreter away for each of its thousand operators and waits for it afterwards, so that it
takes longer by all that another thread does meanwhile. Loading the first graph of a process is half a second of that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Processor seconds that a throttled thread takes during one step.
SHARE = 0.02
#: Seconds between two looks at how many it has taken.
_LOOK = 0.001
#: Seconds after which it goes on in a step that is not over: one that waits for a lock that the thread has.
LONGEST_REST = 0.25


class Throttle:
    """Steps that run, and threads that are to take little time meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = self._begun = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that others are throttled for."""
        with self._changed:
            self._running += 1
            self._begun += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def throttled(self) -> Iterator[None]:
        """A block that takes at most `SHARE` of the processor during one step, and all that it can between two.

        It rests between two calls of functions, as only there Python lets a thread look at the clock: what one function
        of another language does stays in one piece.
        """
        before = sys.getprofile()
        sys.setprofile(self._look())
        try:
            yield
        finally:
            sys.setprofile(before)

    def _look(self) -> Callable[[Any, str, Any], None]:
        next_look = taken = 0.0
        step = 0

        def look(frame: Any, event: str, argument: Any) -> None:
            nonlocal next_look, taken, step
            if not self._running or (now := time.perf_counter()) < next_look:
                return
            next_look = now + _LOOK
            if self._begun != step:
                step, taken = self._begun, time.thread_time()
            elif time.thread_time() - taken >= SHARE:
                with self._changed:
                    self._changed.wait_for(lambda: not self._running or self._begun != step, LONGEST_REST)
                taken = time.thread_time()

        return look


#: Of all sessions of the process, as the interpreter is.
STEPS = Throttle()
