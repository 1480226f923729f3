"""Output of a command: results on stdout with their tables, everything else on stderr, with bars on a terminal."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table

from ..common.process.quiet import forget, known_lines_hidden
from ..common.process.tuning import no_collections
from ..common.progress import bytes_text
from ..errors import shown, shown_generated

if TYPE_CHECKING:
    from ..bundle.manifest import File

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


@dataclass(frozen=True)
class LayerRow:
    """A row of the layer table. Sizes that a layer does not have are None."""

    layer_type: str
    policy: str
    slots: int | None
    heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    dtype: str
    bytes: int


def layer_table(rows: Iterable[LayerRow]) -> Table:
    """Return a table with one line per run of equal layers."""
    table = simple_table(
        "layer", "type", "policy", "slots", "heads", "dim", "dtype", "bytes", right=("slots", "heads", "dim", "bytes")
    )
    for first, count, row in _runs(rows):
        table.add_row(
            str(first) if count == 1 else f"{first}-{first + count - 1}",
            row.layer_type,
            row.policy,
            _number(row.slots),
            _number(row.heads),
            _head_dims(row),
            row.dtype,
            bytes_text(row.bytes) if count == 1 else f"{count} x {bytes_text(row.bytes)}",
        )
    return table


class _Table(Table):
    """A table with one line per row, so that control characters in cells are escaped."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def simple_table(*headers: str, right: Collection[str] = ()) -> Table:
    """Return a table without frames.

    Args:
        headers: Headers of the columns.
        right: Headers of the columns to align right.
    """
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    return table


def _runs(rows: Iterable[LayerRow]) -> Iterator[tuple[int, int, LayerRow]]:
    first = 0
    for row, run in groupby(rows):
        count = sum(1 for _ in run)
        yield first, count, row
        first += count


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _head_dims(row: LayerRow) -> str:
    if row.head_dim == row.value_head_dim:
        return _number(row.head_dim)
    return f"K {_number(row.head_dim)}, V {_number(row.value_head_dim)}"


def engine_table(files: Mapping[str, File]) -> Table:
    """Return a table with one line per engine: builder, optimization profile, and counts of its network."""
    columns = ("layers", "cache updates", "attention layers", "products", "in place")
    table = simple_table("engine", "built with", "for", "new tokens, least/usual/most", *columns, right=columns)
    for record in engines(files):
        layers = record["layers"]
        state = [tensor for tensor in record["inputs"] if tensor["name"].startswith("cache.")]
        table.add_row(
            record["method"],
            record["builder"],
            "SM " + ", ".join(map(str, record["capabilities"])) if record["capabilities"] else "portable",
            _profile(record["inputs"]),
            str(sum(layers.values())),
            str(layers.get("KV_CACHE_UPDATE", 0)),
            str(layers.get("ATTENTION_INPUT", 0)),
            "TF32" if record.get("products") == "tf32" else "stored dtype",
            f"{len(record['aliases'])} of {len(state)} tensors" if state else "-",
        )
    return table


def engines(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """Return the records of all engines in a bundle's files."""
    return [record for file in files.values() for record in file.details.get("engines", [])]


def _profile(inputs: list[Mapping[str, Any]]) -> str:
    """Return the numbers of tokens, such as `2/256/256`; "-" for an encoder of items, whose inputs have one size."""
    ids = next((tensor for tensor in inputs if tensor["name"] in ("input_ids", "inputs_embeds")), None)
    if ids is None:
        return "-"
    sizes = [ids[shape][1] for shape in ("min_shape", "opt_shape", "max_shape")]
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
