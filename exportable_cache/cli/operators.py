"""`exportable-cache operators`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption, KeyOption
from .output.terminal import Terminal


def operators(
    ctx: typer.Context,
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of bundles for ExecuTorch.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="List to write, for -DEC_OPERATORS=FILE of runners/cpp."),
    ] = None,
    key: KeyOption = None,
    json: JsonOption = False,
) -> None:
    """List the operators that bundles call, from which a small C++ program for them is built."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..pipeline.operators import list_operators, write_list

        bundles = [Bundle.open(folder, key=key, progress=progress) for folder in folders]
        found = list_operators(bundles)
        if output is not None:
            write_list(found, bundles, output)
    if json:
        terminal.json({"operators": found.operators, "path": None if output is None else str(output)})
        return
    terminal.print("\n".join(found.operators))
    if output is not None:
        terminal.print(f"\nbuild the C++ program from {output}: -DEC_OPERATORS={output.resolve()}")
