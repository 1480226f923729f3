"""`exportable-cache verify`"""

from __future__ import annotations

from typing import Annotated

import typer

from .command import EXIT_MISMATCH
from .layer_table import simple_table
from .options import BundleArgument, IgnoreVersionsOption, JsonOption, ModelOption
from .settings import at_least
from .terminal import Terminal


def verify(
    ctx: typer.Context,
    folder: BundleArgument,
    model: ModelOption,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            callback=at_least(0),
            help="Largest |logit difference| to accept.",
            show_default="by dtype: 1e-4 in float32",
        ),
    ] = None,
    decode_steps: Annotated[
        int | None,
        typer.Option(
            "--decode-steps",
            metavar="N",
            callback=at_least(1),
            help="Tokens to feed one by one after each prompt.",
            show_default="past every window",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the random tokens.")] = 0,
    ignore_versions: IgnoreVersionsOption = False,
    json: JsonOption = False,
) -> None:
    """Compare a bundle with the eager model, token by token."""
    terminal: Terminal = ctx.obj
    with terminal.progress("loading libraries") as progress:
        from ..bundle.bundle import Bundle
        from ..verification.verify import verify as compare

        bundle = Bundle.open(folder, check_versions=not ignore_versions, progress=progress)
        report = compare(bundle, model, tolerance=tolerance, decode_steps=decode_steps, seed=seed, progress=progress)
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
        terminal.print(str(report), style=None if report.passed else "red")
    if not report.passed:
        if json:
            terminal.error(str(report))
        raise typer.Exit(EXIT_MISMATCH)
