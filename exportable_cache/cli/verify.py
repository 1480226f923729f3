"""The command `exportable-cache verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..verification.spec import VerifySpec
from .command import EXIT_MISMATCH
from .options import (
    BundleArgument,
    Changes,
    IgnoreVersionsOption,
    JsonOption,
    KeyOption,
    LoraOption,
    ModelOption,
    TrustOption,
    at_least,
    declared,
    options_of,
    takes,
)
from .output.tables import simple_table
from .output.terminal import Terminal

RecordOption = Annotated[bool, typer.Option("--record", help="Replace the report in the bundle's manifest.")]
SignOption = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="FILE",
        help="Private key to sign the new manifest with, for --record and a signed bundle.",
        show_default=False,
    ),
]


@takes(
    declared("folder", BundleArgument),
    declared("model", ModelOption),
    *options_of(
        [VerifySpec],
        {name: Changes(about={"callback": at_least(least)}) for name, least in (("tolerance", 0), ("decode_steps", 1))},
    ),
    declared("lora", LoraOption, None),
    declared("trust", TrustOption, False),
    declared("key", KeyOption, None),
    declared("ignore_versions", IgnoreVersionsOption, False),
    declared("record", RecordOption, False),
    declared("sign", SignOption, None),
    declared("json", JsonOption, False),
)
def verify(ctx: typer.Context, folder: Path, model: str, json: bool, **given: Any) -> None:
    """Compare a bundle with the eager model, step by step."""
    terminal: Terminal = ctx.obj
    lora = given.pop("lora")
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..verification.verify import verify as compare

        check_versions = not given.pop("ignore_versions")
        trust, key = given.pop("trust"), given.pop("key")
        bundle = Bundle.open(folder, check_versions=check_versions, trust=trust, key=key, progress=progress)
        report = compare(bundle, model, lora=lora or (), progress=progress, **given)
    if json:
        terminal.json({"path": str(folder), "model": model, **report.to_dict()})
    else:
        headers = ("prompt", "chunks", "decode steps", "max |logit difference|", "same argmax")
        table = simple_table(*headers, right=headers)
        for prompt in report.prompts:
            table.add_row(
                str(prompt.length),
                str(prompt.chunks),
                str(prompt.decode_steps),
                f"{prompt.max_difference:.1e}",
                f"{prompt.argmax_agreement:.1%}",
            )
        terminal.print(table)
        terminal.print()
        if not report.remark:
            terminal.print("executed by " + ("the native runner" if report.runtime == "native" else "torch's runtime"))
        terminal.print(str(report), style=None if report.passed else "red")
    if not report.passed:
        if json:
            terminal.error(str(report))
        raise typer.Exit(EXIT_MISMATCH)
