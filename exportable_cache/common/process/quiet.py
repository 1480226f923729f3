"""Other libraries' chatter, kept off the screen while this package imports them and works: known messages, no others.

| who | what | why it says nothing to a user |
|---|---|---|
| torchao | an extension could not be loaded | they are for GPUs, or for another Python |
| torch's pytrees | `register_constant()` of an enum is deprecated | torchao calls it |
| executorch.exir | a buffer that is mutated has no initial state | a cache has none |
| ExecuTorch's thread pool | files that tell a phone's processor are not there | on a PC they never are |

Nothing here imports torch, so that the command line starts without it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, TextIO, TypeVar

#: Logger -> what it is not to say.
_MESSAGES = {
    "torchao": re.compile(r"Failed to load .*\.so"),
    "torch.utils._pytree": re.compile(r".*register_constant\(\) on Enum subclasses is deprecated"),
}
#: Beginnings of warnings, as patterns.
_WARNINGS = (r"Mutation on a buffer in the model is detected",)

# ExecuTorch's thread pool says so whenever a program is opened on a machine without these files, which is any x86 one.
# It writes through sys.stderr, in pieces, and no logging level reaches it.
_CHATTER_START = "[cpuinfo_utils.cpp:"
_CHATTER = re.compile(
    r"\[cpuinfo_utils\.cpp:\d+\] (Reading file|Failed to open midr file|CPU info and manual query) .*\n"
)

_Call = TypeVar("_Call", bound=Callable[..., Any])
_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)


@contextmanager
def everything_shown() -> Iterator[None]:
    """Let all of it through, for who looks for a fault, and what this package logs beside."""
    token = _SHOWN.set(True)
    ours, handler = logging.getLogger("exportable_cache"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        ours.removeHandler(handler)
        _SHOWN.reset(token)


@contextmanager
def known_chatter_dropped() -> Iterator[None]:
    """Drop the messages of the table above for the length of a block; others pass, and so do exceptions."""
    if _SHOWN.get():
        yield
        return
    with ExitStack() as stack:
        for name, pattern in _MESSAGES.items():
            stack.enter_context(_filtered(logging.getLogger(name), pattern))
        stack.enter_context(warnings.catch_warnings())
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        stack.enter_context(without_chatter())
        yield


def quietly(call: _Call) -> _Call:
    """A function that runs under `known_chatter_dropped`."""

    @wraps(call)
    def quiet_call(*args: Any, **kwargs: Any) -> Any:
        with known_chatter_dropped():
            return call(*args, **kwargs)

    return quiet_call  # type: ignore[return-value]


@contextmanager
def without_chatter() -> Iterator[None]:
    """Drop known lines that are written to `sys.stderr`."""
    stream = _ChatterFilter(sys.stderr)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        stream.finish()


def forget(stream: TextIO | None) -> None:
    """Let what is written to a stream go nowhere: one that takes no more would fail again when Python ends."""
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


class _ChatterFilter(io.TextIOBase):
    """Passes text on at once, but for lines that begin like chatter: those wait until they are complete.

    What stderr does not take is no reason to stop.
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
            if _CHATTER.fullmatch(piece):
                return
            if not piece.endswith("\n") and (piece.startswith(_CHATTER_START) or _CHATTER_START.startswith(piece)):
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
        """Write what still waits."""
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
