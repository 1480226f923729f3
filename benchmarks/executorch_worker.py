"""Run one build of benchmarks/executorch_speed.py in its own process, and time requests.

    python benchmarks/executorch_worker.py FOLDER

Each line of standard input is a request, `decode POSITION STEPS` or `prefill LENGTH STEPS`. Each line of standard
output is a response: milliseconds of wall and of processor time per step, and the peak resident memory in MB so far.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Set before torch starts its threads, because idle ones must not spin while ExecuTorch's thread pool works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

Step = Callable[[int, int], object]  # (new tokens, position of the first)


def ids(count: int) -> torch.Tensor:
    """Return token ids [1, count]."""
    return torch.ones(1, count, dtype=torch.int64)


def bundle(folder: Path, run: dict) -> Step:
    """Open one of our bundles, through its session's runner."""
    from exportable_cache import load
    from exportable_cache.program.methods import chunk_sizes, method_for

    session = load(folder / "bundle")
    runner = session.runner

    def step(count: int, position: int) -> None:
        for size in chunk_sizes(runner.methods, count):
            runner.run(method_for(runner.methods, size, position + size), ids(size), torch.tensor([position]))
            position += size

    return step


def forward(folder: Path, run: dict) -> Step:
    """Open a `.pte` with `forward(tokens, position)`, called as ExecuTorch's runner calls it."""
    method = load_method(folder / "program.pte")

    def step(count: int, position: int) -> None:
        while count:
            size = min(count, run["chunk"])
            method.execute([ids(size), torch.tensor([position])])
            count, position = count - size, position + size

    return step


def stateful(folder: Path, run: dict) -> Step:
    """Open a `.pte` that counts its own position; it is loaded again when it is full, untimed.

    A step takes the same time at every position.
    """
    state = {"method": load_method(folder / "program.pte"), "used": 0}

    def step(count: int, position: int) -> None:
        # In chunks of the size that the other forms use.
        for start in range(position, position + count, run["chunk"]):
            size = min(run["chunk"], position + count - start)
            state["method"].execute([ids(size), torch.arange(start, start + size)])

    def prepare(count: int) -> None:
        if state["used"] + count > run["cache"] - 1:
            state.update(method=load_method(folder / "program.pte"), used=0)
        state["used"] += count

    step.prepare = prepare
    return step


def exporter(folder: Path, run: dict) -> Step:
    """Open an `ExecutorchExporter` program with transformers' runner; a step takes the same time at every position."""
    from transformers.exporters.base import ExportedModel

    exported = ExportedModel.from_pretrained(folder / "exported")
    inputs = torch.load(folder / "inputs.pt", weights_only=False)
    runners = exported.runners

    def step(count: int, position: int) -> None:
        if count == 1:
            runners["decode"](**inputs["decode"])
            return
        # Its prefill takes up to 128 tokens on an empty cache; there is no program for longer prompts.
        for _ in range(count // 128):
            runners["prefill"](**inputs["prefill"])

    return step


def eager(folder: Path, run: dict) -> Step:
    """Step transformers eagerly with `DynamicCache`, filled to the position once; `crop` takes back each step."""
    from executorch_forms import random_model
    from transformers import DynamicCache

    model = random_model(run["model"], run["cache"])
    filled: dict[int, DynamicCache] = {}

    def cache_at(position: int) -> DynamicCache:
        if position not in filled:
            filled.clear()
            cache = DynamicCache(config=model.config)
            config = model.config
            # The time of a step does not depend on the cache's contents.
            shape = (1, config.num_key_value_heads, position, config.head_dim)
            for layer in range(config.num_hidden_layers):
                cache.update(torch.zeros(shape), torch.zeros(shape), layer)
            filled[position] = cache
        return filled[position]

    def step(count: int, position: int) -> None:
        if position == 0:
            model(ids(count), past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
            return
        # Sliding layers cannot be cropped: their next steps see one more token, at the same cost.
        cache = cache_at(position)
        model(ids(count), past_key_values=cache, logits_to_keep=1)
        if not any(cache.is_sliding):
            cache.crop(-count)

    return step


def load_method(path: Path):
    """Load the method `forward` of a file."""
    import executorch.extension.llm.custom_ops.custom_ops
    import executorch.kernels.quantized  # noqa: F401  and these, over a cache or a table in 8 bits
    from executorch.runtime import Runtime, Verification

    program = Runtime.get().load_program(path, verification=Verification.Minimal)
    method = program.load_method("forward")
    method.program = program  # held as well: the method points into it
    return method


RUNNERS = {"bundle": bundle, "forward": forward, "stateful": stateful, "exporter": exporter, "eager": eager}


@torch.no_grad()
def main() -> None:
    """Respond to requests until standard input ends."""
    folder = Path(sys.argv[1])
    # Responses go to the original stdout, where nothing else is printed.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = json.loads((folder / "run.json").read_text())
    step = RUNNERS[run["runner"]](folder, run)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        kind, number, steps = line.split()
        count, position = (1, int(number)) if kind == "decode" else (int(number), 0)
        wall, cpu = [], []
        for _ in range(int(steps)):
            getattr(step, "prepare", lambda count: None)(count)
            start = time.perf_counter(), time.process_time()
            step(count, position)
            wall.append(1e3 * (time.perf_counter() - start[0]))
            cpu.append(1e3 * (time.process_time() - start[1]))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"wall": wall, "cpu": cpu, "peak_mb": peak}), file=answers, flush=True)


if __name__ == "__main__":
    main()
