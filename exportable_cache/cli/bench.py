"""The command `exportable-cache bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import BundleArgument, CheckOption, IgnoreVersionsOption, JsonOption, KeyOption, TrustOption, at_least
from .output.tables import simple_table
from .output.terminal import Terminal, bytes_text
from .runtime import open_natively

if TYPE_CHECKING:
    from ..pipeline.bench import BenchReport
    from ..session.native import NativeSession
    from ..session.session import Session


def bench(
    ctx: typer.Context,
    folder: BundleArgument,
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
    trust: TrustOption = False,
    key: KeyOption = None,
    ignore_versions: IgnoreVersionsOption = False,
    check: CheckOption = False,
    json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed at several positions."""
    terminal: Terminal = ctx.obj
    session: Session | NativeSession | None = open_natively(terminal, folder, ignore_versions, check, key, text=False)
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.bench import bench as run_bench

        if session is None:
            from ..session.session import load

            session = load(folder, check_versions=not ignore_versions, trust=trust, key=key, check=check)
            if session.stepper.ranks is not None:
                terminal.set_rank(session.stepper.ranks.rank)
        report = run_bench(
            session, positions=positions or None, steps=steps, prompt_length=prompt_length, progress=progress
        )
    if json:
        terminal.json({"path": str(folder), **report.to_dict()})
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
    terminal.print(f"\n{runtime}; peak memory of the process {bytes_text(report.peak_rss_bytes)}{threads}")
