"""Known messages of other libraries that are hidden while this package imports and runs them.

| library | message | why a user does not need it |
|---|---|---|
| torchao | an extension could not be loaded | it is for a GPU, or for another Python |
| torch's pytrees | `register_constant()` of an enum is deprecated | torchao calls it |
| executorch.exir | a mutated buffer has no initial state | a cache has none |
| ExecuTorch's thread pool | files that name a phone's processor are missing | a PC never has them |
| ExecuTorch's tokenizers | a fallback for regular expressions is registered | texts are encoded elsewhere |

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, TextIO, TypeVar

#: Messages to hide, by logger.
_MESSAGES = {
    "torchao": re.compile(r"Failed to load .*\.so"),
    "torch.utils._pytree": re.compile(r".*register_constant\(\) on Enum subclasses is deprecated"),
}
#: Patterns for the beginnings of warnings to hide.
_WARNINGS = (r"Mutation on a buffer in the model is detected",)

# ExecuTorch's thread pool writes this whenever a program is opened on an x86 machine. It writes to sys.stderr in
# several parts, and no logging level applies.
_HIDDEN_START = "[cpuinfo_utils.cpp:"
_HIDDEN_LINE = re.compile(
    r"\[cpuinfo_utils\.cpp:\d+\] (Reading file|Failed to open midr file|CPU info and manual query) .*\n"
)

# The same from C++, and what its tokenizers write when they are loaded.
_HIDDEN_NATIVE = re.compile(
    rb"\[cpuinfo_utils\.cpp:\d+\] .*\n|[IE] tokenizers:regex\.cpp:\d+\] Registering override fallback regex\n"
)

_Call = TypeVar("_Call", bound=Callable[..., Any])
_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)


@contextmanager
def all_messages_shown() -> Iterator[None]:
    """Show all messages of other libraries, and this package's log, within a block."""
    token = _SHOWN.set(True)
    logger, handler = logging.getLogger("exportable_cache"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        _SHOWN.reset(token)


@contextmanager
def known_messages_hidden() -> Iterator[None]:
    """Hide the messages of the table above within a block."""
    if _SHOWN.get():
        yield
        return
    with ExitStack() as stack:
        for name, pattern in _MESSAGES.items():
            stack.enter_context(_filtered(logging.getLogger(name), pattern))
        stack.enter_context(warnings.catch_warnings())
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        stack.enter_context(known_lines_hidden())
        yield


def quietly(call: _Call) -> _Call:
    """Return a function that runs under `known_messages_hidden`."""

    @wraps(call)
    def quiet_call(*args: Any, **kwargs: Any) -> Any:
        with known_messages_hidden():
            return call(*args, **kwargs)

    return quiet_call  # type: ignore[return-value]


@contextmanager
def known_lines_hidden() -> Iterator[None]:
    """Drop known lines that are written to `sys.stderr`."""
    stream = _LineFilter(sys.stderr)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        stream.finish()


@contextmanager
def native_lines_hidden() -> Iterator[None]:
    """Drop known lines that libraries write to the process's descriptor of stderr, and pass on the others at the end.

    A process that is killed within the block loses what was written.
    """
    try:
        kept = None if _SHOWN.get() else os.dup(2)
    except OSError:  # stderr is closed
        kept = None
    if kept is None:
        yield
        return
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            file.seek(0)
            with suppress(OSError):
                os.write(kept, _HIDDEN_NATIVE.sub(b"", file.read()))
            os.close(kept)


def forget(stream: TextIO | None) -> None:
    """Redirect a broken stream to the null device, because it would fail again when Python exits."""
    with suppress(OSError, ValueError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def _filtered(logger: logging.Logger, pattern: re.Pattern[str]) -> Iterator[None]:
    def passes(record: logging.LogRecord) -> bool:
        return pattern.match(record.getMessage()) is None

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


class _LineFilter(io.TextIOBase):
    """A stream that passes text on, except known lines. Text that begins like one is held until the line is complete.

    Errors of the underlying stream are ignored.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._held = ""
        self._at_line_start = True

    def write(self, text: str) -> int:
        for piece in text.splitlines(keepends=True):
            self._write_piece(piece)
        return len(text)

    def _write_piece(self, piece: str) -> None:
        if self._held or self._at_line_start:
            piece, self._held = self._held + piece, ""
            if _HIDDEN_LINE.fullmatch(piece):
                return
            if not piece.endswith("\n") and (piece.startswith(_HIDDEN_START) or _HIDDEN_START.startswith(piece)):
                self._held = piece
                return
        self._pass(piece)
        self._at_line_start = piece.endswith("\n")

    def _pass(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError:
            forget(self._stream)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            forget(self._stream)

    def finish(self) -> None:
        """Write held text."""
        self._pass(self._held)
        self._held = ""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding
