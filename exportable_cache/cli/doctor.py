"""`exportable-cache doctor`"""

from __future__ import annotations

import typer

from .options import JsonOption
from .output.tables import simple_table
from .output.terminal import Terminal


def doctor(ctx: typer.Context, json: JsonOption = False) -> None:
    """Show what this machine runs bundles with, and what would be faster."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries"):
        from ..pipeline.doctor import diagnose

        found = diagnose()
    if json:
        terminal.json(found.to_dict())
        return
    table = simple_table("", "")
    threads = "" if found.runtime_threads is None else f", {found.runtime_threads} threads"
    for name, value in (
        ("processor", f"{found.processor}, {found.cores} cores, {found.instruction_set}"),
        ("torch", found.torch),
        ("executorch", "not installed" if found.executorch is None else f"{found.executorch}{threads}"),
        ("attention kernels", found.kernels),
    ):
        table.add_row(name, value)
    terminal.print(table)
    for remedy in found.remedies or ["nothing is known to be faster here"]:
        terminal.print(remedy)
