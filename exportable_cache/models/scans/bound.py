"""How many tokens a step can have at most: scans by doubling take that many rounds, whatever the step's length is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Longest(threading.local):
    """Of this thread's step. TorchDynamo (2.13) traces the attributes of a `threading.local`, and no `ContextVar`."""

    def __init__(self) -> None:
        # On the instance, in every thread: guards of a thread's first graph would else fail once a step has set it.
        self.tokens: int | None = None


_longest = _Longest()


@contextmanager
def longest_step(tokens: int | None) -> Iterator[None]:
    """State the limit for the steps inside the block, or None where the length of each step is known
    when it is traced.
    """
    before = _longest.tokens
    _longest.tokens = tokens
    try:
        yield
    finally:
        _longest.tokens = before


def doublings(length: int) -> int:
    """Rounds that doubling needs to span `length` tokens, which may be symbolic inside `longest_step`."""
    return ((_longest.tokens or length) - 1).bit_length()
