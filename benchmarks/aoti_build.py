"""Measure what more layers cost in target `aoti`: build time, size, and the time of a token.

    python benchmarks/aoti_build.py                            # a Llama of hidden size 256 with 4, 12 and 36 layers
    python benchmarks/aoti_build.py --layers 12 --tree ../before   # with the package of another checkout

Each model is exported in its own process, with Inductor's caches empty except for the headers that are precompiled once
per machine: `decode` and `prefill`, and both again for a read length of 256. Processor seconds are those of all
processes, the better measure on a busy machine; they include tracing. A token's time is the minimum and the median of
200 at the start of the cache, with the processor's number of threads.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

BUCKET, SLOTS, STEPS = 256, 1024, 200
COLUMNS = (
    "layers",
    "built in, s",
    "processor, s",
    "of it tracing",
    "program.pt2, MB",
    "pieces",
    "a token, ms",
    "median",
)


def model_of(layers: int) -> Any:
    """Return a random Llama in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": layers, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048)).eval()


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its finished children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(layers: int, folder: Path) -> list[Any]:
    """Return one row of the table."""
    import torch

    from exportable_cache import export, load
    from exportable_cache.program.program import Program

    model, traced, trace = model_of(layers), [], Program.export

    def timed(self: Program, *arguments: Any, **options: Any) -> Any:
        begin = processor_seconds()
        program = trace(self, *arguments, **options)
        traced.append(processor_seconds() - begin)
        return program

    Program.export = timed  # type: ignore[method-assign]
    begin, used = time.perf_counter(), processor_seconds()
    export(model, "aoti", SLOTS, folder, buckets=[BUCKET], verify=False)
    built, used = time.perf_counter() - begin, processor_seconds() - used
    session = load(folder, trust=True)
    session.prefill(torch.arange(1, 33)[None])
    token, times = torch.tensor([5]), []
    for _ in range(STEPS):
        begin = time.perf_counter()
        session.decode(token)
        times.append(1e3 * (time.perf_counter() - begin))
    table = folder / "regions.json"
    pieces = len(json.loads(table.read_text())["regions"]) if table.is_file() else len(traced)
    size = (folder / "program.pt2").stat().st_size / 1e6
    return [layers, built, used, sum(traced), size, pieces, min(times), statistics.median(times)]


def main(
    layers: Annotated[
        list[int] | None, typer.Option(help="How many, may be repeated; 4, 12 and 36 by default.")
    ] = None,
    tree: Annotated[Path, typer.Option(help="Checkout whose package is measured.")] = Path(__file__).parents[1],
    alone: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure each number of layers in its own process."""
    if alone is not None:
        print(json.dumps(measure((layers or [4])[0], alone)))
        return
    table = Table(*COLUMNS)
    for count in layers or [4, 12, 36]:
        with tempfile.TemporaryDirectory() as empty:
            command = [sys.executable, __file__, "--layers", str(count), "--alone", f"{empty}/bundle"]
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor",
                "PYTHONPATH": str(tree.resolve()),
            }
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
