"""A fork of the process that compiles: two graphs at a time, as most of a graph's time is one thread of Python."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

#: Number, what is asked for, inputs, and whether others go first.
Request = tuple[int, tuple, "list[torch.Tensor]", bool]
#: What has become of it, its number, and why.
Reply = tuple[str, int, str]
#: Serves a request, told of the methods whose read lengths need a graph each, to which it may add one.
Serve = Callable[[Request, set[str]], Reply]


class Queue(Protocol):
    """Where requests wait."""

    def next(self) -> Request:
        """The one to serve now; waits for one."""

    def put(self, request: Request) -> None:
        """Have one served."""


def can_fork() -> bool:
    """Whether a second process would have a core, and a fork holds what it needs. On macOS it does not."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


class Twin:
    """A fork of this process that serves requests as this one does. To be made before there is any thread.

    Args:
        serve: What a request is given to there.
        closed: Open files that the fork must not hold: their other ends wait for their end.
    """

    def __init__(self, serve: Serve, closed: Sequence[int] = ()) -> None:
        (requests, ours), (replies, theirs) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for file in (ours, replies, *closed):
                    os.close(file)
                _serve(serve, requests, theirs)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(theirs)
        self._requests, self._replies = os.fdopen(ours, "wb"), os.fdopen(replies, "rb")

    def serve(self, requests: Queue, unshared: set[str], reply: Callable[..., None]) -> None:
        """Hand requests over as long as the fork is there; the one that it ends with goes back.

        Args:
            requests: Where they come from.
            unshared: See `Serve`.
            reply: Told of each.
        """
        while True:
            request = requests.next()
            try:
                pickle.dump((request, unshared), self._requests)
                self._requests.flush()
                answer, found = pickle.load(self._replies)
            except (EOFError, OSError, pickle.UnpicklingError):
                requests.put(request)
                return
            unshared |= found
            reply(*answer)

    def close(self) -> None:
        """End the fork, once it has served what it was given."""
        with contextlib.suppress(OSError):
            self._requests.close()
        os.waitpid(self.pid, 0)


def _serve(serve: Serve, requests: int, replies: int) -> None:
    """Serve until the process at the other end is gone, and go then, whatever is being compiled."""
    waiting: queue.SimpleQueue[tuple[Request, set[str]]] = queue.SimpleQueue()

    def read() -> None:
        with os.fdopen(requests, "rb") as source:
            while True:
                try:
                    waiting.put(pickle.load(source))
                except Exception:
                    os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    with os.fdopen(replies, "wb") as target:
        while True:
            request, unshared = waiting.get()
            pickle.dump((serve(request, unshared), unshared), target)
            target.flush()
