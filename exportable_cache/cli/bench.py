"""The command `exportable-cache bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.progress import bytes_text
from ..session.opening import Use
from .options import BundleOrModelArgument, JsonOption, number
from .runtime import Opening, open_session, opens
from .terminal import Terminal, simple_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..pipeline.bench import BenchReport, SpeedRow
    from ..session.native import NativeSession
    from ..session.session import Session


@opens
def bench(
    ctx: typer.Context,
    folder: BundleOrModelArgument,
    opening: Opening,
    positions: Annotated[
        list[int] | None,
        number(
            "--positions",
            "Tokens in the cache when decoding is timed; may be repeated.",
            least=0,
            default="five, from empty to full",
        ),
    ] = None,
    steps: Annotated[int | None, number("--steps", "Timed decode steps at each position.", default="32")] = None,
    prompt_length: Annotated[
        int | None, number("--prompt-length", "Tokens of the timed prompt.", default="one prefill chunk")
    ] = None,
    pp: Annotated[
        list[int] | None, number("--pp", "Time prompts of N tokens, as llama-bench; may be repeated.", default=False)
    ] = None,
    tg: Annotated[
        list[int] | None, number("--tg", "Time N decoded tokens, as llama-bench; may be repeated.", default=False)
    ] = None,
    runs: Annotated[int | None, number("--runs", "Runs of each --pp and --tg.", default="5")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table of --pp and --tg (512 and 128).")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed at several positions.

    With --pp, --tg or --markdown, measure as llama-bench does.
    """
    terminal: Terminal = ctx.obj
    if markdown and json:
        raise typer.BadParameter("cannot be combined with --json; pass one of them", param_hint="'--markdown'")
    as_rows = bool(pp or tg or markdown)
    if as_rows and (positions or prompt_length is not None or steps is not None):
        others = "--positions, --steps or --prompt-length"
        raise typer.BadParameter(f"cannot be combined with {others}", param_hint="'--pp' / '--tg'")
    if runs is not None and not as_rows:
        raise typer.BadParameter("needs --pp, --tg or --markdown; pass one of them", param_hint="'--runs'")
    # Steps that run uncompiled while their graph is compiled would be timed otherwise.
    session = open_session(terminal, folder, opening, Use(waits=True), text=False).session
    with terminal.progress("loading libraries") as progress:
        from ..pipeline.bench import bench as run_bench
        from ..pipeline.bench import bench_rows

        if as_rows:
            default = not (pp or tg)
            rows = bench_rows(
                session,
                (512,) if default else pp or (),
                (128,) if default else tg or (),
                runs=runs or 5,
                progress=progress,
            )
            _print_rows(terminal, folder, session, rows, json)
            return
        report = run_bench(
            session,
            positions=positions or None,
            steps=steps or 32,
            prompt_length=prompt_length,
            progress=progress,
        )
    if json:
        terminal.json({"path": str(Path(folder)), **report.to_dict()})
    else:
        _print_report(terminal, report)


def _print_rows(
    terminal: Terminal, folder: str, session: Session | NativeSession, rows: Sequence[SpeedRow], json: bool
) -> None:
    """Print the rows of llama-bench as JSON, or as a table that is also Markdown."""
    from ..pipeline.bench import subject_of

    subject = subject_of(session)
    about = {"runtime": subject.runtime, "batch_size": subject.batch_size, "threads": subject.threads()}
    if json:
        terminal.json({"path": str(Path(folder)), **about, "rows": [row.to_dict() for row in rows]})
        return
    threads = "default" if about["threads"] is None else str(about["threads"])
    cells = [("model", "runtime", "threads", "test", "t/s"), ("---", "---", "---:", "---:", "---:")]
    for row in rows:
        speed = f"{row.mean:.2f} ± {row.deviation:.2f}"
        cells.append((Path(folder).resolve().name, subject.runtime, threads, row.test, speed))
    for line in cells:
        terminal.print(f"| {' | '.join(line)} |")


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
