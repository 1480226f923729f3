"""Compare two checkouts of this package: export, start, and decode speed.

    git worktree add ../before COMMIT
    python benchmarks/two_trees.py ../before .

Every step of every round runs in its own process, and the checkouts are interleaved, so that a slow moment of the
machine affects both. A row is the fastest of the rounds. Only features with the same names in both checkouts are
measured, in one environment.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

SLOTS, CHUNK, STEPS = 4096, 256, 30
ROWS = {
    "export, s": "export, processor seconds",
    "export, MB": "its peak memory, MB",
    "open, s": "open the bundle and give a token, processor seconds with imports",
    "pte @100": "ExecuTorch, a token @100, ms",
    "pte @4088": "@4088",
    "pte prompt": "a prompt of 1024, ms",
    "eager @100": "eager session, a token @100, ms",
    "compiled @100": "compiled session, a token @100, ms",
    "compiled prompt": "a prompt of 256, ms",
}


def model_110m() -> Any:
    """Return a random Llama of 110M parameters in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=SLOTS)).eval()


def milliseconds(step: Callable[[], object], steps: int = STEPS) -> float:
    """Return the milliseconds of the median step."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def chunk_of(call: Callable[..., object]) -> dict[str, int]:
    """Return the longest prompt chunk, by the name that a checkout has for it."""
    names = inspect.signature(call).parameters
    return {"prefill_chunk" if "prefill_chunk" in names else "prefill_length": CHUNK}


def export_once(folder: Path) -> dict[str, float]:
    """Measure an export to ExecuTorch."""
    from exportable_cache import export

    model = model_110m()
    begin = time.process_time()
    export(model, "executorch", SLOTS, folder / "bundle", verify=False, **chunk_of(export))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"export, s": time.process_time() - begin, "export, MB": peak}


def run_bundle(folder: Path) -> dict[str, float]:
    """Measure the exported bundle."""
    import torch

    from exportable_cache import load

    session = load(folder / "bundle")
    session.prefill(torch.ones(1, 8, dtype=torch.int64))
    found = {"open, s": time.process_time()}
    session.reset()
    token = torch.ones(1, dtype=torch.int64)
    begin = time.perf_counter()
    session.prefill(torch.ones(1, 1024, dtype=torch.int64))
    found["pte prompt"] = 1e3 * (time.perf_counter() - begin)
    session.rewind(1024 - 100)
    found["pte @100"] = milliseconds(lambda: session.decode(token))
    session.prefill(torch.ones(1, SLOTS - 8 - STEPS // 2 - session.length.item(), dtype=torch.int64))
    found["pte @4088"] = milliseconds(lambda: session.decode(token), STEPS // 2)
    return found


def run_eager() -> dict[str, float]:
    """Measure an eager session."""
    return {"eager @100": live(False)[0]}


def run_compiled() -> dict[str, float]:
    """Measure a compiled session."""
    from exportable_cache import Session

    # Older checkouts can only wait for each graph.
    knows = "wait" in str(inspect.signature(Session.from_model))
    return dict(zip(("compiled @100", "compiled prompt"), live("wait" if knows else True), strict=True))


def live(compile: str | bool) -> tuple[float, float]:
    """Return the milliseconds of a token at position 100, and of a prompt of 256."""
    import torch

    from exportable_cache import ExportableCache, Session

    model = model_110m()
    chunks = chunk_of(Session.from_model)
    session = Session.from_model(model, ExportableCache.from_model(model, 512), compile=compile, **chunks)
    token, prompt = torch.ones(1, dtype=torch.int64), torch.ones(1, CHUNK, dtype=torch.int64)

    def again() -> None:
        session.reset()
        session.prefill(prompt)

    with torch.no_grad():
        again()
        found = milliseconds(again, 8)
        session.rewind(CHUNK - 100)
        session.decode(token)
        return milliseconds(lambda: session.decode(token)), found


WORK = {
    "export": lambda folder: export_once(folder),
    "bundle": lambda folder: run_bundle(folder),
    "eager": lambda folder: run_eager(),
    "compiled": lambda folder: run_compiled(),
}


def in_process(tree: Path, work: str, folder: Path) -> dict[str, float]:
    """Run a step of `WORK` in a process that imports the package from a checkout."""
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import two_trees as t, pathlib; "
    code += f"print(json.dumps(t.WORK[{work!r}](pathlib.Path({str(folder)!r}))))"
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(
    before: Annotated[Path, typer.Argument(help="A checkout.", exists=True, file_okay=False)],
    after: Annotated[Path, typer.Argument(help="Another.", exists=True, file_okay=False)],
    rounds: Annotated[int, typer.Option(help="Rounds of short steps; exports and compilations run once.")] = 3,
) -> None:
    """Measure both checkouts, and print a table."""
    from exportable_cache.common.native.machine_code import processor_name

    trees = (before.resolve(), after.resolve())
    todo = ["export", "compiled", *["bundle", "eager"] * rounds]
    found: list[dict[str, list[float]]] = [{}, {}]
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, name) for name in ("before", "after")]
        for folder in folders:
            folder.mkdir()
        for work in track(todo, "measuring", transient=True):
            for tree, folder, of in zip(trees, folders, found, strict=True):
                for row, value in in_process(tree, work, folder).items():
                    of.setdefault(row, []).append(value)
    print("| | before | after | |\n|---|---|---|---|")
    for row, title in ROWS.items():
        values = [min(of[row]) for of in found]
        print(f"| {title} | {values[0]:.1f} | {values[1]:.1f} | {values[1] / values[0]:.2f}x |")
    print(f"\n{processor_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} in the end.")


if __name__ == "__main__":
    typer.run(main)
