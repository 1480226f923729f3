"""Compare ExecuTorch's attention kernels with those of `kernels/`: the operators alone, or a bundle's steps.

    python benchmarks/attention_kernels.py --native build/kernels/libexportable_cache_kernels.so
    python benchmarks/attention_kernels.py --native ... --bundle artifacts/x --native-bundle artifacts/x-int8

Each form runs in its own process, and rounds are interleaved: one works while the others wait. `native AVX2` are our
kernels without AVX-512, as on a processor that lacks it. The operators alone are those of a decode step or a prompt's
chunk of 12 layers with 12 query heads of 64 over 4 key heads: `update_cache` for keys and values, and `custom_sdpa`.
Figures are medians, with the fastest in brackets; on a loaded machine read the fastest.
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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

LAYERS, HEADS, KEY_HEADS, DIM = 12, 12, 4, 64
CHUNK = 256
Step = Callable[[int, int], object]  # (new tokens, position of the first)


def write_operators(folder: Path, slots: int) -> None:
    """Write `decode.pte` and `prefill.pte` of the operators alone, over a cache [KEY_HEADS, slots, 1, DIM]."""
    import torch
    from executorch.exir import EdgeCompileConfig, to_edge

    from exportable_cache.common.compat.executorch import register_fused_operators

    register_fused_operators()

    class Operators(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(2 * LAYERS):
                self.register_buffer(f"rows{index}", torch.zeros(KEY_HEADS, slots, 1, DIM))

        def forward(self, query: torch.Tensor, new: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            start, folded = position[0].item(), position[1].item()
            torch._check(start >= 0)
            torch._check(start + new.shape[1] <= slots)
            torch._check(folded >= 0)
            torch._check(folded + query.shape[1] <= slots)
            for layer in range(LAYERS):
                keys, values = getattr(self, f"rows{2 * layer}"), getattr(self, f"rows{2 * layer + 1}")
                torch.ops.llama.update_cache(new, keys, start)
                torch.ops.llama.update_cache(new, values, start)
                causal = query.shape[2] > 1
                query = torch.ops.llama.custom_sdpa(query, keys, values, folded, None, 0.0, causal, DIM**-0.5)
            return query

    groups = HEADS // KEY_HEADS
    # For one token, the query heads of a key head become rows, as in our programs; see `attention_forms`.
    for name, query, tokens in (("decode", (groups, 1), 1), ("prefill", (CHUNK, groups), CHUNK)):
        inputs = (torch.zeros(KEY_HEADS, *query, DIM), torch.zeros(KEY_HEADS, tokens, 1, DIM), torch.tensor([8, 8]))
        exported = torch.export.export(Operators(), inputs, strict=False)
        config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
        with (folder / f"{name}.pte").open("wb") as file:
            to_edge(exported, compile_config=config).to_executorch().write_to_file(file)


def operators(folder: Path) -> Step:
    """Yield steps of the programs that `write_operators` wrote."""
    import torch

    from exportable_cache.common.compat.executorch import load_program

    programs = {name: load_program(folder / f"{name}.pte") for name in ("decode", "prefill")}
    methods = {name: program.load_method("forward") for name, program in programs.items()}
    groups = HEADS // KEY_HEADS
    torch.manual_seed(0)
    inputs = {
        "decode": (torch.randn(KEY_HEADS, groups, 1, DIM), torch.randn(KEY_HEADS, 1, 1, DIM)),
        "prefill": (torch.randn(KEY_HEADS, CHUNK, groups, DIM), torch.randn(KEY_HEADS, CHUNK, 1, DIM)),
    }
    for start in range(0, 4096 - CHUNK, CHUNK):  # what is not a number is slow
        methods["prefill"]([*inputs["prefill"], torch.tensor([start, start])])

    def step(count: int, position: int) -> None:
        if count == 1:
            methods["decode"]([*inputs["decode"], torch.tensor([position, position - groups + 1])])
        for start in range(position, position + count - 1, CHUNK):
            methods["prefill"]([*inputs["prefill"], torch.tensor([start, start])])

    step.programs = programs
    return step


def bundle(folder: Path) -> Step:
    """Yield steps of a bundle, as a session runs them."""
    import torch

    from exportable_cache import load
    from exportable_cache.program.methods import chunk_sizes, method_for

    runner = load(folder).runner

    def step(count: int, position: int) -> None:
        for size in chunk_sizes(runner.methods, count):
            method = method_for(runner.methods, size, position + size)
            runner.run(method, torch.ones(1, size, dtype=torch.int64), torch.tensor([position]))
            position += size

    return step


def work(kind: str, folder: Path, threads: int) -> None:
    """Respond to `decode POSITION STEPS` and `prefill LENGTH STEPS` with milliseconds, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from exportable_cache.backends.executorch.runner import one_blas_thread
    from exportable_cache.common.compat.executorch import runtime
    from exportable_cache.common.native.kernels import load_native_kernels

    if threads:
        runtime()._unsafe_reset_threadpool(threads)
    step = (operators if kind == "operators" else bundle)(folder)
    kernels = load_native_kernels()
    print(json.dumps({"target": kernels and kernels.target}), file=answers, flush=True)
    for line in sys.stdin:
        request, number, steps = line.split()
        count, position = (1, int(number)) if request == "decode" else (int(number), 0)
        wall = []
        with one_blas_thread():
            for _ in range(int(steps)):
                start = time.perf_counter()
                step(count, position)
                wall.append(1e3 * (time.perf_counter() - start))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"wall": wall, "peak_mb": peak}), file=answers, flush=True)


class Worker:
    """One form in its own process."""

    def __init__(self, kind: str, folder: Path, threads: int, environment: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__)), "work", kind, str(folder), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment},
        )
        self.target = self._answer()["target"]

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; run its command to see why: " + " ".join(self._process.args))
        return json.loads(line)

    def ask(self, request: str, number: int, steps: int) -> list[float]:
        """Return the milliseconds of each step."""
        self._process.stdin.write(f"{request} {number} {steps}\n")
        self._process.stdin.flush()
        return self._answer()["wall"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def measure(workers: dict[str, Worker], rounds: int, steps: int, slots: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by request and form; the first round of each request is a warm-up."""
    requests = [("decode", 100), ("decode", slots // 2), ("decode", slots - 8), ("prefill", CHUNK), ("prefill", 1024)]
    times: dict[str, dict[str, list[float]]] = {}
    for request, number in requests:
        for done in range(rounds + 1):
            for name, worker in workers.items():
                found = worker.ask(request, number, steps if request == "decode" else 1)
                if done:
                    times.setdefault(f"{request} {number}", {}).setdefault(name, []).extend(found)
    return times


def main(
    native: Annotated[Path, typer.Option(help="Our compiled kernels.")],
    folder: Annotated[Path | None, typer.Option("--bundle", help="A bundle; the operators alone by default.")] = None,
    native_bundle: Annotated[
        list[Path] | None,
        typer.Option(help="Also time this bundle, exported with -O kernels=native; may be repeated."),
    ] = None,
    slots: Annotated[int, typer.Option(help="Allocated slots; the bundle's, if one is given.")] = 4096,
    target: Annotated[list[str] | None, typer.Option(help="Instruction sets of our kernels; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of the runtime; all cores by default.")] = 0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 10,
    steps: Annotated[int, typer.Option(help="Decode steps a round.")] = 5,
) -> None:
    """Time the forms, and print a table."""
    from exportable_cache.common.native.machine_code import processor_name

    with tempfile.TemporaryDirectory() as temporary:
        kind = "operators" if folder is None else "bundle"
        if folder is None:
            folder = Path(temporary)
            write_operators(folder, slots)
        forms = {"ExecuTorch's": {"EXPORTABLE_CACHE_KERNELS": "executorch"}}
        for name in ("", *(target or ["AVX2"])):
            chosen = {"EXPORTABLE_CACHE_KERNELS": str(native.resolve())}
            forms[f"native {name}".strip()] = {**chosen, **({"EXPORTABLE_CACHE_KERNELS_TARGET": name} if name else {})}
        workers = {name: Worker(kind, folder.resolve(), threads, chosen) for name, chosen in forms.items()}
        for one in native_bundle or ():
            chosen = {"EXPORTABLE_CACHE_KERNELS": str(native.resolve())}
            workers[one.name] = Worker("bundle", one.resolve(), threads, chosen)
        times = measure(workers, rounds, steps, slots)
        titles = [f"{name} ({worker.target})" if worker.target else name for name, worker in workers.items()]
        for worker in workers.values():
            worker.close()
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    machine = f"{processor_name()}, {os.cpu_count()} cores"
    print(f"{machine}; {threads or 'all'} threads; {slots} slots; load {load}; median (fastest), ms\n")
    print("| | " + " | ".join(titles) + " |\n" + "|---" * (len(titles) + 1) + "|")
    for request, of in times.items():
        cells = [f"{statistics.median(found):.2f} ({min(found):.2f})" for found in of.values()]
        print(f"| {request.replace('decode ', 'decode @')} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        typer.run(main)
