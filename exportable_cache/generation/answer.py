"""Which answer a step belongs to: between its steps nobody changes the model, which need not be looked at again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_answer: ContextVar[object | None] = ContextVar("_answer", default=None)


@contextmanager
def steps_of(answer: object) -> Iterator[None]:
    """A block whose steps are of one answer.

    Args:
        answer: The same object in all its blocks, and in those of no other.
    """
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def answer_of_step() -> object | None:
    """Of the block around, None for a step by itself."""
    return _answer.get()
