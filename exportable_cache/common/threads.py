"""How many threads torch's operators use for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """A block whose operators run on so many threads, the calling one among them.

    A thread that runs its first operator meanwhile keeps the number.
    """
    before = torch.get_num_threads()
    # To tell every library of it takes longer than to ask.
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """A block whose operators run on the calling thread: small ones wait longer for others than they take."""
    return threads_of_torch(1)
