"""What keeps a session's answers right when it is used wrongly: by two threads, by two generators, or after a step that
was cut off.

None of it is in traced code: a step costs a lock that only a generator's end waits for, and two assignments, a token a
comparison.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from ..errors import InputError

if TYPE_CHECKING:
    from types import TracebackType

    from .state import SequenceState
    from .stepper import ProgramStepper

Tokens = TypeVar("Tokens")


class StepGuard:
    """Lets one thread run steps at a time, and remembers one that did not finish: `with guard: ...` around it.

    Args:
        lock: Of the program. Forks run one program, and share it.

    Attributes:
        is_broken: Whether a step was cut off that may have written what cannot be taken back.
        last_thread: That ran something last.
    """

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.lock = lock or threading.RLock()
        self.is_broken = False
        self.last_thread = threading.get_ident()
        self._answer: weakref.ref[Answer] | None = None

    def forked(self) -> StepGuard:
        """Of another session over the same program, whose cache is a copy of this one's."""
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
        """Refuse to go on from a cache that a step has left half-written.

        Raises:
            InputError: If it has.
        """
        if self.is_broken:
            raise InputError(
                "a step of this session did not finish, so its cache is half-written, and a layer cannot take that "
                "back; reset() and feed the sequence again, or load_state() what was saved before"
            )

    def begin(self, answer: Answer) -> None:
        """Give an answer its turn.

        Raises:
            InputError: If another one is not finished.
        """
        other = self._answer() if self._answer is not None else None
        if other is not None and not other.has_ended and other.is_current:
            raise InputError(
                "this session is generating: an answer that was begun is not finished; take all of it, close() that "
                "generator, or reset() the session to give it up"
            )
        self._answer = weakref.ref(answer)


class Answer:
    """One generator's turn: it goes on only from where it left the session.

    Args:
        stepper: Of the session, where it is when the answer is asked for.

    Attributes:
        has_ended: Whether it gives out nothing more. A traceback that is kept keeps the answer alive, so that it is
            there says nothing.
    """

    def __init__(self, stepper: ProgramStepper) -> None:
        self._stepper = stepper
        self.has_ended = False
        self._left: tuple[SequenceState, int] = (stepper.state, stepper.moves)

    @property
    def is_current(self) -> bool:
        """Whether the session is where it was left."""
        state, moves = self._left
        return self._stepper.state is state and self._stepper.moves == moves

    def steps(self, begin: Callable[[], Generator[Tokens]]) -> Generator[Tokens]:
        """What an iterator gives, each item computed under the session's lock.

        Raises:
            InputError: If the session was reset, or has run or gone elsewhere since the item before, or another
                generator's answer is not finished.
        """
        stepper, steps = self._stepper, None
        try:
            while True:
                with stepper.guard:
                    self._check_place(has_begun=steps is not None)
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
                # Here, not where its last reference goes: what it takes back must not meet another thread's step.
                with stepper.guard.lock:
                    steps.close()

    def _check_place(self, has_begun: bool) -> None:
        """Refuse to go on from elsewhere.

        Raises:
            InputError: If the session is not where it was left. Between the call and the first token its own thread may
                move it; another one's move is a mistake.
        """
        if not self.is_current and (has_begun or self._stepper.guard.last_thread != threading.get_ident()):
            raise InputError(
                "the session was reset, moved or used otherwise since this generator gave out its last token, "
                "so its answer cannot go on; start another one, and use fork() for several at a time"
            )
