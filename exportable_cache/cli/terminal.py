"""Output of a command: results on stdout, everything else on stderr, with progress bars on a terminal."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType

from ..common.process.quiet import forget, known_lines_hidden
from ..common.process.tuning import no_collections
from ..errors import shown, shown_generated

# Wider than any table, so that rows are never cut; a narrower terminal wraps them.
_WIDTH = 1000
_SECONDS_OF_SILENCE = 2.0
_SECONDS_BETWEEN_LINES = 10.0

Callback = Callable[[str, int, "int | None"], None]


class _Results(Console):
    """A stdout whose reader may go away, which ends the command."""

    def on_broken_pipe(self) -> None:
        # The default handler exits with 1, which means a mismatch here.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Remarks(Console):
    """A stderr that the command does not need."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True
            forget(sys.__stderr__)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """Output of one command.

    Args:
        stdout: Stream of the results; `sys.stdout` may be redirected while a command runs.
    """

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout
        self._out = _Results(file=stdout, width=_WIDTH, highlight=False, markup=False, emoji=False)
        # The original stream, because rich replaces sys.stderr while a bar is drawn and writes through this console.
        self._err = _Remarks(file=sys.stderr, highlight=False, markup=False, emoji=False)
        self._prefix, self._is_silent = "", False

    def print(self, renderable: RenderableType = "", style: str | None = None) -> None:
        """Print lines or a table to stdout, without cutting or wrapping. Control characters are escaped."""
        if self._is_silent:
            return
        if isinstance(renderable, str):
            renderable = shown(renderable, keep="\n")
        self._out.print(renderable, style=style, soft_wrap=isinstance(renderable, str))

    def write(self, text: str) -> None:
        """Write text to stdout unchanged, and flush."""
        if self._is_silent:
            return
        self.stdout.write(text)
        self.stdout.flush()

    def generated(self, text: str) -> None:
        """Write generated text to stdout, and flush. Control characters are escaped on a terminal."""
        self.write(shown_generated(text) if self.stdout.isatty() else text)

    def json(self, document: Any) -> None:
        """Write the JSON document of a command."""
        self.write(json.dumps(_finite(document), indent=2) + "\n")

    def note(self, text: str) -> None:
        """Write a remark to stderr."""
        if not self._is_silent:
            self._err.print(shown(text, keep="\n"), style="dim", soft_wrap=True)

    def note_all(self, lines: Iterable[str]) -> None:
        """Write several remarks to stderr."""
        for line in lines:
            self.note(line)

    def error(self, text: str) -> None:
        """Write an error to stderr."""
        self._err.print(self._prefix + shown(text, keep="\n"), style="red", soft_wrap=True)

    def set_rank(self, rank: int) -> None:
        """Silence this process unless it is rank 0 of several that run one command; errors are still written."""
        if rank:
            self._prefix = f"rank {rank}: "
            self._is_silent = True

    @contextmanager
    def progress(self, first: str) -> Iterator[Callback]:
        """Show progress on stderr: a bar on a terminal, otherwise a line per stage after two seconds.

        Args:
            first: Stage to show until the first report.

        Yields:
            A callback `(stage, done, total or None)`.
        """
        if self._err.is_terminal:
            shows = _bars(self._err)
        else:
            shows = _lines(self._err)
        with shows as draw:

            def callback(stage: str, done: int, total: int | None) -> None:
                draw(shown(stage), done, total)

            callback(first, 0, None)
            yield callback

    @contextmanager
    def opening(self, folder: object) -> Iterator[None]:
        """Show that a bundle is being opened, and import its libraries without garbage collection."""
        with self.progress(f"opening {folder}"), no_collections():
            yield


@contextmanager
def _lines(console: Console) -> Iterator[Callback]:
    lines = _Lines(console)
    # A timer, because the first stage may never report again.
    timer = threading.Timer(_SECONDS_OF_SILENCE, lines.speak)
    timer.daemon = True
    timer.start()
    try:
        yield lines.report
    finally:
        timer.cancel()


class _Lines:
    """A line per stage, and occasional lines for a long stage; none in the first seconds of a command."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._stage, self._count = "", ""
        self._printed_stage, self._printed_at = "", 0.0

    def report(self, stage: str, done: int, total: int | None) -> None:
        self._stage, self._count = stage, "" if total is None else f" {done}/{total}"
        now = time.monotonic()
        if now - self._start < _SECONDS_OF_SILENCE:
            return
        if stage != self._printed_stage or (total is not None and now - self._printed_at >= _SECONDS_BETWEEN_LINES):
            self.speak()

    def speak(self) -> None:
        with self._lock:
            repeated = self._stage == self._printed_stage
            self._printed_stage, self._printed_at = self._stage, time.monotonic()
            self._console.print(f"{self._stage} ...{self._count if repeated else ''}", soft_wrap=True)


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def _bars(console: Console) -> Iterator[Callback]:
    """Show a bar for the current stage, until the end of the block."""
    # Imported here, because most commands that a program runs have no terminal.
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class _Bar(BarColumn):
        def render(self, task: Task) -> RenderableType:  # type: ignore[override]
            return Text() if task.total is None else super().render(task)

    class _Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", style="dim")

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), _Bar(24), _Count(), TimeElapsedColumn())
    # One bar for the current stage, removed at the end. Filter again, because rich replaces sys.stderr meanwhile.
    with Progress(*columns, console=console, transient=True) as shown_bars, known_lines_hidden():
        shown: dict[str, Any] = {}

        def callback(stage: str, done: int, total: int | None) -> None:
            if shown.get("stage") != stage:
                if "task" in shown:
                    shown_bars.remove_task(shown["task"])
                shown.update(stage=stage, task=shown_bars.add_task(stage, total=total))
            shown_bars.update(shown["task"], completed=done, total=total)

        yield callback
