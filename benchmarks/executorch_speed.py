"""Build and time ExecuTorch programs of one model from every exporter; ratios are what counts.

    python benchmarks/executorch_speed.py --plot executorch.svg         # Llama 110M and a hybrid, caches to 32768
    python benchmarks/executorch_speed.py --quick                       # Llama 110M, cache 512
    python benchmarks/executorch_speed.py --model llama-110m --cache 4096 --form ours --form executorch

Builds stay in the folder for the next run; delete a build's folder to make it again. Results stay there too: a run
replaces those of the forms that it timed and prints all, so the benchmark can be run in parts. Forms are compared with
the first form of their run, so each part should begin with `--form ours`. All forms of a run are in memory at once.

Every build is timed in its own process, because programs in one process change each other's speed by a tenth, depending
on the order of loading. Rounds are interleaved nevertheless: one process works while the others wait, so that a slow
moment of the machine affects all. On a loaded machine use `--clock cpu --threads 1`, because processor time does not
count other processes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from executorch_forms import FORMS, MODELS, serves
from rich.console import Console

HERE = Path(__file__).parent
CACHES = (512, 4096, 16384, 32768)
console = Console(stderr=True)


def build(form: str, model: str, cache: int, folder: Path) -> dict[str, Any] | None:
    """Build a form unless it exists; return seconds, peak memory and bytes, or None on failure."""
    done = folder / "build.json"
    if done.is_file():
        return json.loads(done.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(f"building {form}, {model}, cache {cache}")
    start = time.perf_counter()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "executorch_forms.py"), form, model, str(cache), str(folder.resolve())],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        console.print(f"{form} failed, see {folder / 'log.txt'}")
        return None
    files = [path for path in folder.rglob("*") if path.suffix == ".pte"]
    result = {
        "seconds": time.perf_counter() - start,
        # Includes finished children, because ExecuTorch's export runs in one.
        "peak_mb": usage.ru_maxrss / 1024,
        "files_mb": sum(path.stat().st_size for path in files) / 1e6,
        "files": len(files),
    }
    done.write_text(json.dumps(result))
    return result


class Worker:
    """A running build."""

    def __init__(self, folder: Path, threads: int | None) -> None:
        environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        if folder.name.rpartition("-")[2] != "eager":
            # Programs run in ExecuTorch's threads; MKL's threads would slow every form down, see `blas_threads`.
            environment["MKL_NUM_THREADS"] = "1"
        self._log = (folder / "worker.txt").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "executorch_worker.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.peak_mb = 0.0
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended, see {self._log.name}")
        return json.loads(line)

    def ask(self, kind: str, number: int, steps: int) -> dict[str, Any]:
        """Return the times of some steps."""
        self._process.stdin.write(f"{kind} {number} {steps}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.peak_mb = answer["peak_mb"]
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def measure(
    folders: dict[str, Path],
    requests: list[tuple[str, int]],
    rounds: int,
    steps: int,
    trials: int,
    threads: int | None,
    clock: str,
) -> dict[str, dict[str, Any]]:
    """Return median milliseconds of every request by form, and peak memory; forms that fail are left out."""
    times: dict[str, dict[str, list[float]]] = {form: {} for form in folders}
    peaks: dict[str, float] = {}
    for trial in range(trials):
        workers: dict[str, Worker] = {}
        for form in list(times):
            try:
                workers[form] = Worker(folders[form], threads)
            except RuntimeError as error:
                console.print(f"{form}: {error}")
                del times[form]
        for kind, number in requests:
            for done in range(rounds + 1):
                for form in list(workers):
                    try:
                        # The first round is a warm-up.
                        count = 1 if kind == "prefill" or not done else steps
                        answer = workers[form].ask(kind, number, count)
                    except (RuntimeError, OSError) as error:
                        console.print(f"{form}, {kind} {number}: {error}")
                        # Earlier results are kept.
                        worker = workers.pop(form)
                        peaks[form] = max(peaks.get(form, 0.0), worker.peak_mb)
                        worker.close()
                        continue
                    if done:
                        times[form].setdefault(f"{kind} {number}", []).extend(answer[clock])
            console.print(f"trial {trial + 1} of {trials}: {kind} {number} done")
        for form, worker in workers.items():
            peaks[form] = max(peaks.get(form, 0.0), worker.peak_mb)
            worker.close()
    return {
        form: {"ms": {request: statistics.median(values) for request, values in of.items()}, "peak_mb": peaks[form]}
        for form, of in times.items()
        if of
    }


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge new rows into the old ones with the same model, cache and form, in the order of the forms.

    A form that others of an earlier run were compared with keeps its row, unless they are compared again.
    """
    again = {row["form"] for row in new}
    bases = {(row["model"], row["cache"], row["base"]) for row in old if row["form"] not in again}
    new = [row for row in new if (row["model"], row["cache"], row["form"]) not in bases]
    rows = {(row["model"], row["cache"], row["form"]): row for row in (*old, *new)}
    order = {form: index for index, form in enumerate(FORMS)}
    return sorted(rows.values(), key=lambda row: (list(MODELS).index(row["model"]), row["cache"], order[row["form"]]))


def table(rows: list[dict[str, Any]]) -> str:
    """Return all results as one Markdown table per model and cache."""
    lines = []
    for model, cache in dict.fromkeys((row["model"], row["cache"]) for row in rows):
        group = [row for row in rows if (row["model"], row["cache"]) == (model, cache)]
        requests = list(dict.fromkeys(request for row in group for request in row["ms"]))
        titles = [_title(request) for request in requests]
        lines += [
            f"\n**{model}, cache {cache}**\n",
            f"| | {' | '.join(titles)} | peak MB | files MB | export s | export MB |",
        ]
        lines.append("|---" * (len(titles) + 5) + "|")
        for row in group:
            cells = []
            for request in requests:
                if request not in row["ms"]:
                    cells.append("-")
                    continue
                ms, base = row["ms"][request], row["base_ms"].get(request)
                kind, number = request.split()
                shown = f"{ms:.1f}" if kind == "decode" else f"{1e3 * int(number) / ms:.0f}"
                cells.append(shown if row["form"] == row["base"] or not base else f"{shown} ({ms / base:.2f}x)")
            built = row["build"]
            files = (
                f"{built['files_mb']:.0f}"
                if built["files"] < 2
                else f"{built['files']} x {built['files_mb'] / built['files']:.0f}"
            )
            exported = [files, f"{built['seconds']:.0f}", f"{built['peak_mb']:.0f}"] if built["files"] else ["-"] * 3
            lines.append(f"| {row['title']} | {' | '.join(cells)} | {row['peak_mb']:.0f} | {' | '.join(exported)} |")
    lines.append("\nIn brackets: how many times as long as ours in the same run.")
    return "\n".join(lines)


def _title(request: str) -> str:
    kind, number = request.split()
    return f"ms per token @{number}" if kind == "decode" else f"prefill {number}, tok/s"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot decode at position 100 and near the end over the cache size, a column per model."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "executorch", "svg.fonttype": "none"})
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(models), figsize=(max(7, 4.5 * len(models)), 6.2), squeeze=False, sharey="row", layout="constrained"
    )
    for index, form in enumerate(dict.fromkeys(row["form"] for row in rows)):
        for column, model in enumerate(models):
            of = [row for row in rows if (row["model"], row["form"]) == (model, form)]
            for line, end in enumerate((False, True)):
                points = [
                    (row["cache"], ms)
                    for row in of
                    for request, ms in row["ms"].items()
                    if request.startswith("decode") and (request != "decode 100") == end
                ]
                if points:
                    width = 2.5 if form == "ours" else 1
                    axes[line][column].plot(
                        *zip(*points, strict=True),
                        "o-",
                        color=f"C{index}",
                        linewidth=width,
                        label=FORMS[form][0].replace("`", ""),
                    )
    for column, model in enumerate(models):
        for line, where in enumerate(("at position 100", "near the end")):
            axes[line][column].set_title(f"{model}, {where}", fontsize=9)
            axes[line][column].set(xscale="log", yscale="log", xlabel="slots allocated")
            caches = sorted({row["cache"] for row in rows})
            axes[line][column].set_xticks(caches, caches)
            axes[line][column].minorticks_off()
    for line in axes:
        line[0].set_ylabel("ms per token")
    labels = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(
    folder: Annotated[Path, typer.Option(help="Where builds and results stay.")] = Path("artifacts/bench-executorch"),
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; may be repeated.")] = None,
    cache: Annotated[list[int] | None, typer.Option(help="Slots allocated; may be repeated.")] = None,
    form: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(FORMS)}; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One model, the smallest cache, fewer rounds.")] = False,
    trials: Annotated[int, typer.Option(help="How often every process is started again.")] = 3,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per trial.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of each form per round.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Threads of each process; all cores by default.")] = None,
    clock: Annotated[str, typer.Option(help="wall, or cpu on a loaded machine.")] = "wall",
    plot: Annotated[Path | None, typer.Option(help="Also draw the results here; needs matplotlib.")] = None,
) -> None:
    """Build what is missing, time it, add to results.json and results.md in the folder, and print the tables."""
    models = model or (["llama-110m"] if quick else ["llama-110m", "gemma3-hybrid"])
    caches = cache or (CACHES[:1] if quick else CACHES)
    if quick:
        trials, rounds = 1, 3
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"] if results.is_file() else []
    for name in models:
        for length in caches:
            folders, builds = {}, {}
            for chosen in form or FORMS:
                if serves(chosen, name):
                    place = folder / f"{name}-{length}-{chosen}"
                    built = build(chosen, name, length, place)
                    if built is not None:
                        folders[chosen], builds[chosen] = place, built
            requests = [("decode", 100), ("decode", length - 8)]
            requests += [("prefill", count) for count in (128, 1024) if count < length]
            measured = measure(folders, requests, rounds, steps, trials, threads, clock)
            base = next(iter(measured), None)
            new = [
                {
                    **{
                        "model": name,
                        "cache": length,
                        "form": chosen,
                        "title": FORMS[chosen][0],
                        "build": builds[chosen],
                    },
                    **{"clock": clock, "threads": threads, "base": base, "base_ms": measured[base]["ms"], **result},
                }
                for chosen, result in measured.items()
            ]
            rows = merged(rows, new)
            # Written after every group, so that results survive an interruption.
            results.write_text(json.dumps({"rows": rows}, indent=2))
            (folder / "results.md").write_text(table(rows) + "\n")
    print(table(rows))
    if plot is not None:
        draw(rows, plot)


if __name__ == "__main__":
    typer.run(main)
