"""Measure how soon a compiled loop gives tokens: a prompt and 200 tokens in a new process, cold and then warm.

    python benchmarks/cold.py                                  # 110M Llama, cache 4096, prompt of 100 tokens
    python benchmarks/cold.py --model gemma3-hybrid --json cold.json --plot cold.svg
    python benchmarks/cold.py --model qwen3-36 --form "transformers static" --limit 110 --json cold.json --plot cold.svg

Forms: ours, compiled in the background and when a graph is needed; transformers' `StaticCache` with a compiled decode
and an eager prompt, as in its `generate`; a loop in the style of gpt-fast (Llamas only); transformers in eager mode.
Each runs in two processes: the first with empty caches of compiled code, the second with the first one's caches.
Imports and the model's construction are not counted; compilation and the compiler's import are. With `--folder`,
compiled code is kept, so that `--start cold` and `--start warm` can be two calls. With `--json`, the table and plot
show everything in the file. A process that takes longer than `--limit` is ended, and its partial results are kept.

Columns per form: seconds to the first, second and last token, the longest wait between two, the median milliseconds of
the last 20 tokens, and for ours when `warm_up` returns after them, with every graph loaded. Processor seconds are those
of all processes, the better measure on a busy machine. Memory is the sum of the peak resident memory of this process
and of those that compile for it, where shared pages of forks count for each.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROMPT, TOKENS = 100, 200
FORMS = ("ours, in the background", "ours, waiting", "transformers static", "gpt-fast style", "transformers eager")
_TIMES = ("1st token", "2nd", f"{TOKENS}th", "longest wait", "in the end", "everything")
COLUMNS = ("model", "form", "start", *_TIMES, "processor", "memory")
#: The last tokens, whose median is the final speed of a form.
LAST = 20


@dataclass
class Run:
    """Results of one process.

    Attributes:
        model, form, warm: What ran.
        times: Seconds from the model's construction to each token.
        everything: Seconds until every graph was loaded; None if not measured.
        processor: Processor seconds of all processes.
        memory: GiB.
    """

    model: str
    form: str
    warm: bool
    times: list[float] = field(default_factory=list)
    everything: float | None = None
    processor: float = 0.0
    memory: float = 0.0

    @property
    def last_ms(self) -> float:
        """Median milliseconds of the last tokens."""
        return 1e3 * statistics.median(self._waits()[-LAST:])

    @property
    def stall(self) -> float:
        """Longest wait between two tokens, in seconds."""
        return max(self._waits())

    @property
    def is_whole(self) -> bool:
        """True if the process was not ended early."""
        return len(self.times) == TOKENS

    def _waits(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its finished children."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def descendants(pid: int) -> Iterator[int]:
    """Return the ids of the living descendants of a process."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def living_usage() -> tuple[float, float]:
    """Return processor seconds and GiB of the living descendants and their finished children; Linux only."""
    seconds = kib = 0.0
    for child in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{child}/status").read_text()
        except FileNotFoundError:
            continue
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        kib += int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else 0
    return seconds, kib / 2**20


def loop_of(form: str, name: str, length: int, folder: str) -> Callable[[], Iterator[object]]:
    """Make the model, and yield tokens, then None when everything is compiled."""
    import torch
    from loop import random_model

    model = random_model(name, length)
    model.generation_config.eos_token_id = None
    prompt = torch.randint(0, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    if form.startswith("ours"):
        from exportable_cache import ExportableCache, Session

        def ours() -> Iterator[object]:
            cache = ExportableCache.from_model(model, length)
            how = "background" if form.endswith("background") else "wait"
            with Session.from_model(model, cache, compile=how, graph_cache=f"{folder}/graphs") as session:
                yield from session.generate(prompt, TOKENS)
                session.reset()
                session.warm_up()
                yield None

        return ours

    def others() -> Iterator[object]:
        from gpt_fast_loop import GptFastLlama
        from transformers import DynamicCache, StaticCache

        with torch.no_grad():
            static = form == "transformers static"
            cache = StaticCache(config=model.config, max_cache_len=length) if static else DynamicCache()
            tokens = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]
            yield tokens
            if form == "gpt-fast style":
                fast = GptFastLlama(model, 1, length).eval()
                for layer, other in zip(fast.layers, cache.layers, strict=True):
                    layer.keys[:, :, :PROMPT], layer.values[:, :, :PROMPT] = other.keys, other.values
                step = torch.compile(fast, fullgraph=True, dynamic=False)
            compiled = torch.compile(model, fullgraph=True, dynamic=False) if static else model
            for position in range(PROMPT, PROMPT + TOKENS - 1):
                if form == "gpt-fast style":
                    logits = step(tokens, torch.tensor([position]))
                else:
                    positions = torch.tensor([[position]])
                    logits = compiled(tokens, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
                    logits = logits[:, -1]
                tokens = logits.argmax(-1)[:, None]
                yield tokens

    return others


def measure(form: str, name: str, length: int, folder: str) -> Run:
    """Measure a form in this process."""
    loop, run = loop_of(form, name, length, folder), Run(name, form, warm=False)
    before, start, at_end = processor_seconds(), time.perf_counter(), None
    for token in loop():
        if token is None:
            run.everything = time.perf_counter() - start
            # Read before they are ended, because forks of an ended process lose their parent.
            at_end = processor_seconds(), *living_usage()
        else:
            run.times.append(time.perf_counter() - start)
            print(run.times[-1], flush=True)
    seconds, of_others, memory = at_end or (processor_seconds(), 0.0, 0.0)
    run.processor = seconds + of_others - before
    if not memory:
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    run.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 + memory
    return run


def run_of(form: str, name: str, length: int, warm: bool, folder: str, limit: float) -> Run:
    """Measure a form in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, __file__, "--model", name, "--length", str(length), "--form", form, "--child", folder]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            told, errors = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            told, _ = child.communicate()
            return Run(name, form, warm, [float(line) for line in told.splitlines()])
    if child.returncode:
        raise SystemExit(errors)
    return Run(**json.loads(told.splitlines()[-1]) | {"warm": warm})


def main(
    model: Annotated[str, typer.Option(help="A model of benchmarks/loop.py.")] = "llama-110m",
    length: Annotated[int, typer.Option(help="Slots allocated.")] = 4096,
    forms: Annotated[list[str] | None, typer.Option("--form", help="All by default; `none` for none.")] = None,
    starts: Annotated[list[str] | None, typer.Option("--start", help="`cold` or `warm`, both by default.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Keep compiled code here; forms have folders of their own.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a process is ended.")] = 1800.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Add the figures to those in this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw tokens over time; needs matplotlib.")] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the times of each form, cold and warm."""
    if child is not None:
        print(json.dumps(asdict(measure((forms or [""])[0], model, length, child))))
        return
    if unknown := set(forms or ()) - {*FORMS, "none"}:
        raise typer.BadParameter(f"must be one of {', '.join(FORMS)}, got {sorted(unknown)}", param_hint="'--form'")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("it needs matplotlib: pip install matplotlib", param_hint="'--plot'")
    console, begin = Console(width=170), os.getloadavg()[0]
    runs: dict[tuple[str, str, bool], Run] = {}
    if json_path is not None and json_path.exists():
        runs = {
            (run.model, run.form, run.warm): run for run in (Run(**one) for one in json.loads(json_path.read_text()))
        }
    for form in forms or [form for form in FORMS if model.startswith("llama") or form != "gpt-fast style"]:
        if form == "none":
            continue
        with tempfile.TemporaryDirectory() as temporary:
            # Inductor's compiler does not support spaces in names.
            kept = temporary if folder is None else str(folder / re.sub(r"\W+", "-", f"{model} {form}"))
            for warm in (False, True):
                if ("warm" if warm else "cold") not in (starts or ("cold", "warm")):
                    continue
                if not warm:
                    shutil.rmtree(kept, ignore_errors=True)
                os.makedirs(kept, mode=0o700, exist_ok=True)
                run = runs[model, form, warm] = run_of(form, model, length, warm, kept, limit)
                console.print(table_of([run]))
                if json_path is not None:
                    json_path.write_text(json.dumps([asdict(one) for one in runs.values()], indent=1))
    console.print(table_of([*runs.values()]))
    if markdown is not None:
        markdown.write_text(markdown_of([*runs.values()], begin))
    if plot is not None:
        draw([*runs.values()], plot)


def table_of(runs: list[Run]) -> Table:
    """Return a table for the terminal."""
    table = Table()
    for column in COLUMNS:
        table.add_column(column)
    for cells in cells_of(runs):
        table.add_row(*cells)
    return table


def cells_of(runs: list[Run]) -> Iterator[list[str]]:
    """Yield the cells of each row."""
    for run in runs:
        times = [f"{value:.1f} s" for value in (*run.times[:2], *(run.times[TOKENS - 1 :]))]
        cells = [run.model, run.form, "warm" if run.warm else "cold", *times]
        if run.is_whole:
            everything = "" if run.everything is None else f"{run.everything:.1f} s"
            cells += [f"{run.stall:.2f} s", f"{run.last_ms:.0f} ms", everything]
            cells += [f"{run.processor:.0f} s", f"{run.memory:.1f} GiB"]
        elif run.times:
            cells += [""] * (2 - len(run.times)) + [f"{len(run.times)} tokens after {run.times[-1]:.0f} s"]
        yield cells + [""] * (len(COLUMNS) - len(cells))


def markdown_of(runs: list[Run], begin: float) -> str:
    """Return the table of the documentation, with the machine it was measured on."""
    from exportable_cache.common.native.machine_code import processor_name

    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *cells_of(runs)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"load of the machine {begin:.1f} before and {os.getloadavg()[0]:.1f} in the end"
    measured = f"{cores} cores, {processor_name()}, torch {metadata.version('torch')}; {load}."
    return "\n".join([*lines, "", measured]) + "\n"


def draw(runs: list[Run], path: Path) -> None:
    """Plot tokens over time."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "cold", "svg.fonttype": "none"})
    models = list(dict.fromkeys(run.model for run in runs))
    size = (10, 0.6 + 2.6 * len(models))
    figure, axes = pyplot.subplots(len(models), 2, figsize=size, sharey=True, squeeze=False, layout="constrained")
    colors = {form: f"C{index}" for index, form in enumerate(FORMS)}
    for row, model in zip(axes, models, strict=True):
        for axis, warm in zip(row, (False, True), strict=True):
            for run in (run for run in runs if (run.model, run.warm) == (model, warm)):
                axis.plot(run.times, range(1, len(run.times) + 1), label=run.form, color=colors[run.form])
            axis.set_title(f"{model}, {'warm' if warm else 'cold'}", fontsize=9)
            axis.set_xlabel("seconds")
        row[0].set_ylabel("tokens")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    typer.run(main)
