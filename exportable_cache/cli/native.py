"""`exportable-cache native`: build the kernels and the C++ runner's library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ExportableCacheError
from .command import Command
from .options import JsonOption
from .output.terminal import Terminal

native = typer.Typer(help="Build native kernels and the runner without torch.", no_args_is_help=True)


@native.command(cls=Command)
def build(
    ctx: typer.Context,
    sources: Annotated[
        Path | None,
        typer.Option("--sources", metavar="DIR", help="Clone of the repository.", show_default="this checkout"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Folder to write.", show_default="in this environment"),
    ] = None,
    optional: Annotated[
        bool, typer.Option("--optional", help="Succeed with one line if it cannot be built here.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compile native kernels and the runner without torch into this environment.

    Nothing is compiled if sources and executorch are those of the last build.
    """
    from ..backends.executorch.native.build import build_native

    terminal: Terminal = ctx.obj
    try:
        with terminal.progress("compiling the native package"):
            package = build_native(sources, output)
    except ExportableCacheError as error:
        if not optional:
            raise
        # The remedy is the last line; the compiler's output is before it.
        reason = str(error).splitlines()[-1]
        if json:
            terminal.json({"kernels": None, "runner": None, "is_new": False, "reason": reason})
        else:
            terminal.print(f"native package: not built: {reason}")
        return
    if json:
        found = {"kernels": str(package.kernels), "runner": str(package.runner), "is_new": package.is_new}
        terminal.json(found | {"reason": None})
    else:
        terminal.print(f"native package: {'built' if package.is_new else 'up to date'}: {package.kernels.parent}")
