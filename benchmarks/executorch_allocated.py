"""Measure what unfilled slots cost: one model with caches of several sizes, at the same position in one run.

    python benchmarks/executorch_speed.py --model llama-110m --form ours        # builds them
    python benchmarks/executorch_allocated.py

It also prints the peak memory of each `.pte` in a process without this package, as for ExecuTorch's export.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from executorch_forms import CHUNK
from executorch_speed import CACHES, Worker

POSITION = 100


def times(folders: dict[int, Path], rounds: int, steps: int) -> dict[int, float]:
    """Return the median milliseconds of a decoded token by allocated slots, with interleaved rounds."""
    workers = {cache: Worker(folder, None) for cache, folder in folders.items()}
    found: dict[int, list[float]] = {cache: [] for cache in folders}
    for done in range(rounds + 1):
        for cache, worker in workers.items():
            answer = worker.ask("decode", POSITION, steps if done else 1)
            # The first round is a warm-up.
            found[cache] += answer["wall"] if done else []
    for worker in workers.values():
        worker.close()
    return {cache: statistics.median(values) for cache, values in found.items()}


def peak_mb(program: Path, cache: int) -> float:
    """Return the peak MB of a process that runs a `.pte` through `forward`: a token at both ends and a prompt."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.pte").symlink_to(program.resolve())
        (folder / "run.json").write_text(json.dumps({"runner": "forward", "chunk": min(CHUNK, cache), "cache": cache}))
        worker = Worker(folder, None)
        for kind, number in (("decode", POSITION), ("decode", cache - 8), ("prefill", min(1024, cache))):
            worker.ask(kind, number, 2)
        worker.close()
    return worker.peak_mb


def main(
    folder: Annotated[Path, typer.Option(help="Folder of the builds.")] = Path("artifacts/bench-executorch"),
    model: Annotated[str, typer.Option(help="A model of executorch_forms.py.")] = "llama-110m",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 12,
    steps: Annotated[int, typer.Option(help="Decode steps per round.")] = 8,
) -> None:
    """Print the speed and memory of the builds."""
    folders = {cache: folder / f"{model}-{cache}-ours" for cache in CACHES}
    folders = {cache: place for cache, place in folders.items() if (place / "run.json").is_file()}
    if not folders:
        raise typer.BadParameter(f"{folder} holds no build of {model}; run executorch_speed.py first")
    for cache, milliseconds in times(folders, rounds, steps).items():
        peak = peak_mb(folders[cache] / "bundle" / "program.pte", cache)
        print(f"{cache} slots: {milliseconds:.2f} ms at position {POSITION}, peak memory {peak:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
