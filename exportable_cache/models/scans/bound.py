"""How many tokens a step can have at most: scans by doubling take that many rounds, whatever the step's length is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_limit: int | None = None


@contextmanager
def longest_step(tokens: int | None) -> Iterator[None]:
    """State the limit for the steps inside the block, or None where the length of each step is known when it is traced."""
    global _limit
    before, _limit = _limit, tokens
    try:
        yield
    finally:
        _limit = before


def doublings(length: int) -> int:
    """Rounds that doubling needs to span `length` tokens, which may be symbolic inside `longest_step`."""
    return ((_limit or length) - 1).bit_length()
