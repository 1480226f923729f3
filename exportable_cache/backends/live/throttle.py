"""A thread that loads graphs takes turns with steps of few tokens: the two share Python's interpreter.

A step as it is gives the interpreter away for each of its thousand operators and waits for it afterwards, so that it
takes longer by more than what another thread does meanwhile. Loading the first graph of a process is half a second of
that. So such a thread rests while a step runs, and the step behind it waits until the thread has had its share.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Processor seconds that a thread has before each step.
SHARE = 0.01
#: Seconds between two looks at how many it has taken.
_LOOK = 0.001
#: Seconds that a step waits for threads to take their share. One that waits for a lock that the step's thread has, or
#: that is in a long function of another language, comes to no place where it could rest.
LONGEST_WAIT = 0.02
#: Seconds after which a thread takes its share in a step that is not over: one that waits for a lock that it has.
LONGEST_REST = 0.25


class Throttle:
    """Steps, and threads that take turns with them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: Steps that run, and those that wait to begin.
        self._running = self._waiting = 0
        #: Threads, and whether it is the turn of each.
        self._turns: dict[int, bool] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block in which others rest; it begins behind their turn."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not any(self._turns.values()), LONGEST_WAIT)
            finally:
                self._waiting -= 1
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                if not self._running:
                    self._turns = dict.fromkeys(self._turns, True)
                    self._changed.notify_all()

    @contextmanager
    def throttled(self) -> Iterator[None]:
        """A block that runs between two steps, for `SHARE` of the processor where the next one waits to begin.

        It rests between two calls of functions, as only there Python lets a thread look at the clock: what one function
        of another language does stays in one piece.
        """
        # Python tells a profiler of each call of C as well, for three times the processor that loading takes.
        before, me = sys.gettrace(), threading.get_ident()
        with self._changed:
            self._turns[me] = not self._running
        sys.settrace(self._look(me))
        try:
            yield
        finally:
            sys.settrace(before)
            with self._changed:
                del self._turns[me]
                self._changed.notify_all()

    def _look(self, thread: int) -> Callable[[Any, str, Any], None]:
        begun = time.thread_time()
        next_look = 0.0
        is_amid = False

        def look(frame: Any, event: str, argument: Any) -> None:
            nonlocal begun, next_look, is_amid
            if not (self._running or self._waiting) or (now := time.perf_counter()) < next_look:
                return
            next_look = now + _LOOK
            if (self._running and not is_amid) or time.thread_time() - begun >= SHARE:
                is_amid = not self._rest(thread)
                begun = time.thread_time()

        return look

    def _rest(self, thread: int) -> bool:
        """Wait for the thread's turn; whether it has come."""
        with self._changed:
            self._turns[thread] = False
            self._changed.notify_all()
            has_come = self._changed.wait_for(lambda: self._turns[thread], LONGEST_REST)
            self._turns[thread] = True
            return has_come


#: Of all sessions of the process, as the interpreter is.
STEPS = Throttle()
