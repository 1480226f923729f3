"""One session answers requests in the order in which they come, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ...decoding.completion import Completer, Completion, Piece
from ...generation.constraint import Constraint, Follower

Result = TypeVar("Result")
#: Requests whose forms are compiled or followed at a time: each has a process.
_MOST_FORMS = 4


class Busy(Exception):
    """As many requests wait as may."""


class Engine:
    """Runs completions one after another.

    A request that is given up, while it waits, while its prompt is fed or during its answer, makes room for the next
    one at once: the step that is running ends, and no other is taken.

    Args:
        completer: Over the session.
        most_waiting: Requests that wait while another one is answered.

    Attributes:
        answered: Requests that were answered, or given up amid an answer.
    """

    def __init__(self, completer: Completer, most_waiting: int) -> None:
        self.completer = completer
        self.answered = 0
        self._most_waiting = most_waiting
        self._waiting = 0
        self._lock = asyncio.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="session")
        # Forms are compiled before the turn of a request, because some take seconds until they are refused.
        self._forms = asyncio.Semaphore(_MOST_FORMS)
        self._compiler = ThreadPoolExecutor(_MOST_FORMS, thread_name_prefix="forms")

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._waiting

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Something done in the session's thread, between steps."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def run(
        self, begin: Callable[[Follower | None], Completion], form: Constraint | None = None
    ) -> AsyncIterator[tuple[Completion, Piece]]:
        """The pieces of an answer, each with the answer as far as it is there.

        Args:
            begin: Makes it, given what follows `form`; tokenising is done there, too.
            form: The form of the answer.

        Raises:
            Busy: If too many wait.
        """
        if self._waiting >= self._most_waiting and (self._lock.locked() or self._forms.locked()):
            raise Busy
        follower: Follower | None = None
        completion: Completion | None = None
        async with AsyncExitStack() as held:
            self._waiting += 1
            try:
                if form is not None:
                    await held.enter_async_context(self._forms)
                    loop = asyncio.get_running_loop()
                    follower = await loop.run_in_executor(self._compiler, self.completer.follow, form)
                await held.enter_async_context(self._lock)
            finally:
                self._waiting -= 1
            try:
                completion = await self.call(begin, follower)
                while (piece := await self.call(next, completion, None)) is not None:
                    yield completion, piece
            finally:
                # Behind the step that may be running; the next request's first one comes behind this.
                if completion is not None:
                    self.answered += 1
                    # The worker may be feeding the prompt: that ends with the chunk that is running.
                    completion.give_up()
                    self._worker.submit(completion.close)
                elif follower is not None:
                    follower.close()

    def close(self) -> None:
        """End the processes that follow forms, and the threads after the step that is running."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self.completer.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
