"""`exportable-cache kernels`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command import Command
from .options import JsonOption
from .output.terminal import Terminal

kernels = typer.Typer(help="Compile attention kernels for ExecuTorch bundles.", no_args_is_help=True)


@kernels.command(cls=Command)
def build(
    ctx: typer.Context,
    sources: Annotated[
        Path | None,
        typer.Option(
            "--sources", metavar="DIR", help="Folder kernels/ of the repository.", show_default="this checkout's"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Library to write.", show_default="in this environment"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile them, into this environment: they serve from then on."""
    terminal: Terminal = ctx.obj
    with terminal.progress("compiling the attention kernels"):
        from ..backends.executorch.native.build import build_kernels

        path = build_kernels(sources, output)
    if json:
        terminal.json({"path": str(path)})
    else:
        terminal.print(f"{path}\nbundles for ExecuTorch use it from now on; `exportable-cache doctor` shows it")
