"""The command `exportable-cache adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .command import EXIT_MISMATCH
from .options import JsonOption
from .output.terminal import Terminal


def adapter(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a LoRA adapter, as peft saved it.")],
    bundle: Annotated[
        Path, typer.Option("--for", metavar="DIR", help="Bundle with slots for it (export --lora-slots).")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Eager model to compare with.", show_default="the adapter's base"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default="FOLDER.adapter"),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare the program's logits with the model's.", show_default=True),
    ] = True,
    sign: Annotated[
        Path | None,
        typer.Option("--sign", metavar="FILE", help="Private Ed25519 key to sign the file with.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make the file of an adapter for a bundle, and verify the bundle with it."""
    terminal: Terminal = ctx.obj
    path = output or folder.resolve().with_name(f"{folder.resolve().name}.adapter")
    report = None
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..models.loading.adapters import base_of, read_lora
        from ..session.adapters import write_adapter_file
        from ..verification.verify import verify as compare

        read = read_lora(folder)
        opened = Bundle.open(bundle, progress=progress)
        if opened.manifest.program.lora is None:
            raise InputError(
                f"{bundle} has no slots for adapters; export the model with lora_slots=1 or more (--lora-slots)"
            )
        slots = opened.manifest.program.lora.described()
        if verify:
            report = compare(opened, model or base_of(folder), adapter=folder, progress=progress)
        if report is None or report.passed:
            recorded = None if report is None else report.to_dict()
            write_adapter_file(path, read, slots, opened.manifest.fingerprint, recorded, sign)
    if report is not None and not report.passed:
        terminal.error(f"{report}; {path} was not written")
        raise typer.Exit(EXIT_MISMATCH)
    if json:
        terminal.json({"path": str(path), "verification": None if report is None else report.to_dict()})
        return
    terminal.print(f"{path}: {read.name}, rank {read.rank}, {len(read.tensors)} layers, {path.stat().st_size:,} bytes")
    terminal.print("not verified" if report is None else str(report))
