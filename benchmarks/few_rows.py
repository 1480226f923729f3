"""Measure linear layers of few rows alone: GB of weights per second by the native operator, oneDNN and MKL.

    python benchmarks/few_rows.py                                  # shapes of the 110M Llama, float32 and lower

Weights are larger than the processor's caches, and every form runs all of its weights, as a step does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from exportable_cache.backends.live.ops import linear
from exportable_cache.common.compat.torch import linear_by_onednn
from exportable_cache.common.native.machine_code import processor_name

#: [in, out] of the linear layers of a decoder layer.
SHAPES = {
    "llama-110m": [(768, 768), (768, 256), (768, 256), (768, 768), (768, 2048), (768, 2048), (2048, 768)],
    "llama-500m": [(1536, 1536), (1536, 384), (1536, 384), (1536, 1536), (1536, 4096), (1536, 4096), (4096, 1536)],
}
_GROUP = 32


@torch.no_grad()
def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "llama-110m",
    rows: Annotated[list[int] | None, typer.Option(help="1, 2, 4, 8 and 16 by default.")] = None,
    megabytes: Annotated[int, typer.Option(help="Size of the float32 weights.")] = 250,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the fastest counts.")] = 5,
) -> None:
    """Print the speed of each form and number of rows."""
    if not linear.OPERATORS.load():
        raise SystemExit(f"the kernel is not there: {linear.OPERATORS.code.reason or 'there is no compiler'}")
    weights: list[torch.Tensor] = []
    while sum(weight.nbytes for weight in weights) < megabytes * 10**6:
        weights += [torch.randn(out, size) for size, out in SHAPES[model]]
    low = [weight.bfloat16() for weight in weights]
    integers = [(20 * weight).to(torch.int8) for weight in weights]
    scales = [torch.rand(weight.shape[0], 1) for weight in weights]
    groups = [torch.rand(weight.shape[0], weight.shape[1] // _GROUP) for weight in weights]
    zeros = [torch.zeros(scale.shape, dtype=torch.int8) for scale in groups]
    int8 = torch.ops.exportable_cache.few_rows_linear_int8.default
    times: dict[tuple[str, int], list[float]] = {}
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for count in rows or [1, 2, 4, 8, 16]:
        x = {size: torch.randn(count, size) for weight in weights for size in (weight.shape[1],)}
        of = [x[weight.shape[1]] for weight in weights]
        calls |= {
            ("float32, MKL", count): lambda of=of: [*map(torch.nn.functional.linear, of, weights)],
            ("float32, oneDNN", count): lambda of=of: [*map(linear_by_onednn, of, weights)],
            ("float32, ours", count): lambda of=of: [linear.plain_linear(*one, None) for one in zip(of, weights)],
            ("bfloat16, ours", count): lambda of=of: [linear.plain_linear(*one, None) for one in zip(of, low)],
            ("int8, ours", count): lambda of=of: [int8(*one) for one in zip(of, integers, scales)],
            ("int8 in groups of 32, ours", count): lambda of=of: [
                int8(*one) for one in zip(of, integers, groups, zeros)
            ],
        }
    for call in calls.values():
        call()
    for _ in range(rounds):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            times.setdefault(key, []).append(time.perf_counter() - begin)
    total = sum(weight.nbytes for weight in weights)
    shares = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25, "int8 in groups of 32": 0.25}
    counts = list(dict.fromkeys(count for _, count in calls))
    table = Table("form", *(f"{count} rows, ms (GB/s)" for count in counts))
    for form in dict.fromkeys(form for form, _ in calls):
        read = total * shares[form.rpartition(",")[0]]
        cells = [min(times[form, count]) for count in counts]
        table.add_row(form, *(f"{1e3 * seconds:.1f} ({read / seconds / 1e9:.0f})" for seconds in cells))
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{model}, {total / 1e6:.0f} MB in float32, {torch.get_num_threads()} threads, {processor_name()}, torch "
        f"{torch.__version__}; load of the machine {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    typer.run(main)
