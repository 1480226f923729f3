"""Errors of the libraries that run tokenizers, as errors of this package: the one place where they are caught."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from ...errors import ExportableCacheError, InputError, first_line

_SHOWN = 300


class tokenizer_errors(ContextDecorator):
    """A block, or a function, that calls a tokenizer. What the tokenizer's library raises in it becomes an InputError.

    The library `tokenizers` is written in Rust. Where it panics, Python gets an exception that is not an `Exception`,
    so that no ordinary handler catches it.

    Args:
        said: What the message begins with, as "the tokenizer cannot encode the prompt".
        remedy: What the user can do.
    """

    def __init__(self, said: str, remedy: str = "correct its files, or export the model with another") -> None:
        self._said, self._remedy = said, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (ExportableCacheError, MemoryError)):
            return
        if isinstance(error, Exception) or is_panic(error):
            raise InputError(f"{self._said}: {first_line(error)[:_SHOWN]}; {self._remedy}") from error


def is_panic(error: BaseException) -> bool:
    """Return True if a library in Rust has panicked. Each such library has a class of its own for it."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
