"""Keeping other libraries' chatter off the screen, for the length of one command."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

#: Loggers that report optional parts which are not installed, or talk to their own developers.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.export", "executorch", "coremltools", "transformers")

# ExecuTorch's thread pool says so whenever a program is opened on a machine without these files, which is any x86 one.
# It writes through sys.stderr, in pieces, and no logging level reaches it.
_CHATTER_START = "[cpuinfo_utils.cpp:"
_CHATTER = re.compile(
    r"\[cpuinfo_utils\.cpp:\d+\] (Reading file|Failed to open midr file|CPU info and manual query) .*\n"
)


@contextmanager
def quiet_third_parties() -> Iterator[None]:
    """Show no warnings, of the noisy libraries only errors, and no known chatter. Exceptions and other text pass."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), without_chatter():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def without_chatter() -> Iterator[None]:
    """Drop known lines that are written to `sys.stderr`."""
    stream = _ChatterFilter(sys.stderr)
    try:
        with redirect_stderr(stream):
            yield
    finally:
        stream.finish()


class _ChatterFilter(io.TextIOBase):
    """Passes text on at once, but for lines that begin like chatter: those wait until they are complete."""

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
        self._stream.write(piece)
        self._at_line_start = piece.endswith("\n")

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Write what still waits."""
        self._stream.write(self._held)
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
