"""Export models of published sizes: seconds by stage, peak memory, file size, and the speed of the bundle.

    python benchmarks/real_sizes.py qwen3-0.6b llama-3.2-1b          # or all of them, without names
    python benchmarks/real_sizes.py qwen3-0.6b --recipe fast         # native operators, 8-bit keys and values

Checkpoints are written first, with random weights (benchmarks/published_shapes.py). Each is exported in its own
process, to ExecuTorch with 4-bit weights, 8-bit embeddings and a cache of 2048 tokens, including verification; another
process opens the bundle and times it. Results go into a JSON file, one entry per model, and `--table` prints a Markdown
table of it.

Memory is the process's anonymous memory (`RssAnon` in /proc, Linux only), because the system may drop mapped pages of
the checkpoint at any time. The peak resident memory, which includes them, is given as well.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from published_shapes import SHAPES, write_checkpoint

CACHE = 2048
QUANTIZED = {"quantize": "8da4w"}


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Stages:
    """Seconds and peak memory of each stage of an export."""

    def __init__(self) -> None:
        self.stages: list[dict[str, Any]] = []
        self._since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if not self.stages or self.stages[-1]["stage"] != stage:
            self._close()
            self.stages.append({"stage": stage, "peak_bytes": anonymous_bytes()})

    def closed(self) -> list[dict[str, Any]]:
        self._close()
        return self.stages

    def _close(self) -> None:
        now = time.monotonic()
        if self.stages:
            self.stages[-1]["seconds"] = now - self._since
        self._since = now

    def _watch(self) -> None:
        while True:
            if self.stages:
                self.stages[-1]["peak_bytes"] = max(self.stages[-1]["peak_bytes"], anonymous_bytes())
            time.sleep(0.1)


def export_one(checkpoint: Path, bundle: Path, recipe: str = "") -> dict[str, Any]:
    """Export a model by a recipe, or to 4 bits without one, in a process of its own; the import is included."""
    start = time.monotonic()
    from exportable_cache import export

    stages = Stages()
    options = {"recipe": recipe} if recipe else QUANTIZED
    made = export(checkpoint, max_cache_len=CACHE, output_dir=bundle, overwrite=True, progress=stages, **options)
    found = stages.closed()
    return {
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time(),
        "stages": found,
        "peak_bytes": max(stage["peak_bytes"] for stage in found),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "file_bytes": (bundle / "program.pte").stat().st_size,
        "cache_bytes": made.manifest.cache_bytes,
        "verification": {key: made.manifest.verification[key] for key in ("max_difference", "tolerance", "steps")},
    }


def run_one(bundle: Path) -> dict[str, Any]:
    """Open a bundle in a process of its own: seconds to the first token, and speeds."""
    import torch

    imported = time.process_time()
    from exportable_cache import load
    from exportable_cache.pipeline.bench import bench

    session = load(bundle)
    session.prefill(torch.randint(3, 1000, (1, 16)))
    first = time.process_time()
    report = bench(session, positions=[100, CACHE - 64], steps=16, prompt_length=128)
    return {
        "import_torch_seconds": imported,
        "first_token_seconds": first,
        "prefill_tokens_per_second": report.prefill_tokens_per_second,
        "decode_ms": {timing.position: timing.median_ms for timing in report.decode},
        "peak_bytes": anonymous_bytes(),
    }


def processor() -> str:
    """Return the processor's name, and whether it has AVX-512."""
    from exportable_cache.common.native.machine_code import instructions, processor_name

    return f"{processor_name()}, {'AVX-512' if 'avx512f' in instructions() else 'no AVX-512'}"


def table(results: dict[str, Any]) -> Iterator[str]:
    """Return the results as a Markdown table."""
    yield "| model | export, s | quantise / lower / verify | peak, GB | file, MB | cache, MB | prefill | ms @100 |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        export, run = result["export"], result["run"]
        seconds = [
            sum(stage["seconds"] for stage in export["stages"] if stage["stage"].startswith(word))
            for word in ("quantising", "lowering", "verifying")
        ]
        sizes = [export[key] / 1e6 for key in ("file_bytes", "cache_bytes")]
        yield (
            f"| {name} | {export['seconds']:.0f} | {' / '.join(f'{one:.0f}' for one in seconds)} "
            f"| {export['peak_bytes'] / 1e9:.1f} | {sizes[0]:.0f} | {sizes[1]:.0f} "
            f"| {run['prefill_tokens_per_second']:.0f} | {run['decode_ms']['100']:.0f} |"
        )


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Model names; all by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of checkpoints and bundles.")] = Path("artifacts/real-sizes"),
    results: Annotated[Path, typer.Option(help="JSON, added to.")] = Path("docs/real_sizes.json"),
    show: Annotated[bool, typer.Option("--table", help="Print the table and measure nothing.")] = False,
    recipe: Annotated[str, typer.Option(help="Recipe of the exports; 8da4w without one.")] = "",
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Export, open and time models of true size."""
    if child:
        (name,) = names
        places = (folder / name / "checkpoint", folder / name / "bundle")
        print(json.dumps(export_one(*places, recipe) if child == "export" else run_one(places[1])))
        return
    found = json.loads(results.read_text()) if results.is_file() else {}
    if not show:
        for name in names or SHAPES:
            write_checkpoint(name, folder / name / "checkpoint")
            measured: dict[str, Any] = {"processor": processor()}
            for what in ("export", "run"):
                command = [sys.executable, __file__, name, "--folder", str(folder), "--child", what]
                command += ["--recipe", recipe]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                measured[what] = json.loads(printed.splitlines()[-1])
            found[f"{name} {recipe}".strip()] = measured
            results.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(json.loads(json.dumps(found)))))


if __name__ == "__main__":
    typer.run(main)
