"""Progress bars on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ...common.process.quiet import known_lines_hidden

Callback = Callable[[str, int, "int | None"], None]


class _Bar(BarColumn):
    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return Text() if task.total is None else super().render(task)


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", style="dim")


@contextmanager
def bars(console: Console) -> Iterator[Callback]:
    """Show a bar for the current stage, until the end of the block."""
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
