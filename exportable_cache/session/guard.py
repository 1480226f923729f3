"""Refuses misuse of a session by two threads or two generators, and steps after one that was interrupted.

None of it is in traced code. A call takes the lock once, and each token costs one comparison of the state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import InputError

if TYPE_CHECKING:
    from types import TracebackType


Tokens = TypeVar("Tokens")


class StepGuard:
    """Lets one thread at a time run steps (`with guard: ...`), and remembers a step that did not finish.

    Args:
        lock: Lock of the program. Forks run the same program, so they share it.

    Attributes:
        is_broken: True if an interrupted step may have overwritten what cannot be taken back.
        last_thread: Thread that ran something last.
    """

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.lock = lock or threading.RLock()
        self.is_broken = False
        self.last_thread = threading.get_ident()
        self._generation: weakref.ref[Generation] | None = None

    def forked(self) -> StepGuard:
        """Return the guard of another session over the same program, whose cache is a copy."""
        fork = StepGuard(self.lock)
        fork.is_broken = self.is_broken
        return fork

    def __enter__(self) -> StepGuard:
        if not self.lock.acquire(blocking=False):
            raise InputError(
                "this session, or a fork of it, is running a step already, in another thread; a session is for one "
                "thread at a time: give each thread a session of its own"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.last_thread = threading.get_ident()
        self.lock.release()

    def check_whole(self) -> None:
        """Check that no step has left the cache half-written.

        Raises:
            InputError: If one has.
        """
        if self.is_broken:
            raise InputError(
                "a step of this session did not finish, so its cache is half-written, and a layer cannot take that "
                "back; reset() and feed the sequence again, or load_state() what was saved before"
            )

    def begin(self, generation: Generation) -> None:
        """Make a generation the current one.

        Raises:
            InputError: If another one is not finished.
        """
        other = self._generation() if self._generation is not None else None
        if other is not None and not other.has_ended and other.is_current:
            raise InputError(
                "this session is generating: another generator has not finished; take all of its tokens, close() it, "
                "or reset() the session to drop it"
            )
        self._generation = weakref.ref(generation)


class Guarded(Protocol):
    """The part of a `ProgramStepper` that a generation looks at."""

    state: Any
    moves: int
    guard: StepGuard


class Generation:
    """A generator's use of a session. It continues only if the session is where the generator left it.

    Args:
        stepper: The stepper of the session, at the time of the call.

    Attributes:
        has_ended: True if it gives no more tokens. A traceback may keep the object alive after its end.
    """

    def __init__(self, stepper: Guarded) -> None:
        self._stepper = stepper
        self.has_ended = False
        self._left: tuple[Any, int] = (stepper.state, stepper.moves)

    @property
    def is_current(self) -> bool:
        """True if the session is where this generation left it."""
        state, moves = self._left
        return self._stepper.state is state and self._stepper.moves == moves

    def steps(self, begin: Callable[[], Generator[Tokens]]) -> Generator[Tokens]:
        """Yield the items of the generator that `begin` makes, each computed under the session's lock.

        Raises:
            InputError: If the session was used or moved since the last item, or another generation is not finished.
        """
        stepper, steps = self._stepper, None
        try:
            while True:
                with stepper.guard:
                    self._check_unmoved(has_begun=steps is not None)
                    if steps is None:
                        stepper.guard.begin(self)
                        steps = begin()
                    try:
                        tokens = next(steps)
                    except StopIteration:
                        return
                    self._left = stepper.state, stepper.moves
                yield tokens
        finally:
            self.has_ended = True
            if steps is not None:
                # Closed under the lock, because closing may take tokens back while another thread runs a step.
                with stepper.guard.lock:
                    steps.close()

    def _check_unmoved(self, has_begun: bool) -> None:
        """Check that the session is where it was left.

        Its own thread may move it between the call and the first token. A move by another thread is a mistake.
        """
        if not self.is_current and (has_begun or self._stepper.guard.last_thread != threading.get_ident()):
            raise InputError(
                "the session was reset, moved or used otherwise since this generator gave out its last token, so "
                "it cannot continue; start another one, and use fork() for several at a time"
            )
