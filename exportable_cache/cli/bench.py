"""The command `exportable-cache bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.sizes import bytes_text
from ..session.opening import Use
from .options import BundleOrModelArgument, JsonOption, at_least
from .output.tables import simple_table
from .output.terminal import Terminal
from .runtime import Opening, open_session, opens

if TYPE_CHECKING:
    from ..pipeline.bench import BenchReport


@opens
def bench(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    positions: Annotated[
        list[int] | None,
        typer.Option(
            "--position",
            metavar="N",
            callback=at_least(0),
            help="Tokens in the cache when decoding is timed; may be repeated.",
            show_default="five, from empty to full",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", callback=at_least(1), help="Timed decode steps at each position.")
    ] = 32,
    prompt_length: Annotated[
        int | None,
        typer.Option(
            "--prompt-length",
            metavar="N",
            callback=at_least(1),
            help="Tokens of the timed prompt.",
            show_default="one prefill chunk",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed at several positions."""
    terminal: Terminal = ctx.obj
    # Steps that run uncompiled while their graph is compiled would be timed otherwise.
    session = open_session(terminal, folder, opening, Use(waits=True), text=False).session
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.bench import bench as run_bench

        report = run_bench(
            session, positions=positions or None, steps=steps, prompt_length=prompt_length, progress=progress
        )
    if json:
        terminal.json({"path": str(Path(folder)), **report.to_dict()})
    else:
        _print_report(terminal, report)


def _print_report(terminal: Terminal, report: BenchReport) -> None:
    terminal.print(
        f"prefill  {report.prefill_tokens_per_second:.0f} tokens/s for a prompt of {report.prompt_length} tokens, "
        f"batch size {report.batch_size}\n"
    )
    headers = ("tokens in the cache", "decode ms/token", "p90", "tokens/s", "steps")
    table = simple_table(*headers, right=headers)
    for row in report.decode:
        table.add_row(
            str(row.position),
            f"{row.median_ms:.2f}",
            f"{row.p90_ms:.2f}",
            f"{1000 * report.batch_size / row.median_ms:.1f}",
            str(row.steps),
        )
    terminal.print(table)
    threads = "" if report.threads is None else f", {report.threads} torch threads"
    runtime = "the native runner" if report.runtime == "native" else "torch's runtime"
    peak = f"peak memory of the process {bytes_text(report.peak_rss_bytes)}"
    if report.peak_device_bytes is not None:
        peak += f", of the GPU {bytes_text(report.peak_device_bytes)}"
    terminal.print(f"\n{runtime}; {peak}{threads}")
