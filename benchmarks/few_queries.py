"""Measure attention of a decode step alone: GB of keys and values per second by the native operator, and by torch.

    python benchmarks/few_queries.py                                  # heads of the 110M Llama, 12 layers, 1 and 8 rows

Each layer has its own keys and values, which are larger than the processor's caches together, and every form runs all
layers, as a step does. torch gets as many slots as a compiled step reads, rounded up to 128, and the native operator
all that are allocated.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from loop import copy_bandwidth
from rich.console import Console
from rich.table import Table

from exportable_cache.backends.live.ops import attention
from exportable_cache.common.native.machine_code import processor_name
from exportable_cache.program.lengths import READ_STEP

LAYERS = 12
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.no_grad()
def main(
    batches: Annotated[list[int] | None, typer.Option("--batch", help="Rows; 1 and 8 by default.")] = None,
    filled: Annotated[list[int] | None, typer.Option(help="Tokens; 100, 1000 and 4000 by default.")] = None,
    slots: Annotated[int, typer.Option(help="Allocated.")] = 4096,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    kv_heads: Annotated[int, typer.Option(help="Key heads.")] = 4,
    dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = "float32",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; their median counts.")] = 9,
) -> None:
    """Print the speed of each form at each length."""
    if not attention.OPERATORS.load():
        raise SystemExit(f"the kernel is not there: {attention.OPERATORS.code.reason or 'there is no compiler'}")
    bandwidth, kind = copy_bandwidth(), DTYPES[dtype]
    table = Table("rows", "tokens", "torch, ms (GB/s)", "ours, ms (GB/s)", "of the bound")
    for batch in batches or [1, 8]:
        shape = (batch, kv_heads, slots, dim)
        keys, values = ([torch.randn(shape).to(kind) for _ in range(LAYERS)] for _ in range(2))
        query = torch.randn(batch, kv_heads, heads // kv_heads, dim).to(kind)
        for count in filled or [100, 1000, 4000]:
            mask = torch.where(torch.arange(slots) < count, 0.0, torch.finfo(kind).min).to(kind)
            mask = mask.expand(batch, 1, 1, slots).contiguous()
            read = min(-(-count // READ_STEP) * READ_STEP, slots)
            short = mask[..., :read].contiguous()
            forms: dict[str, Callable[[], list[torch.Tensor]]] = {
                "torch": lambda query=query, keys=keys, values=values, read=read, short=short: [
                    torch.nn.functional.scaled_dot_product_attention(query, k[:, :, :read], v[:, :, :read], short)
                    for k, v in zip(keys, values)
                ],
                "ours": lambda query=query, keys=keys, values=values, mask=mask: [
                    attention.attention(query, k, v, mask) for k, v in zip(keys, values)
                ],
            }
            times: dict[str, list[float]] = {form: [] for form in forms}
            for call in forms.values():
                call()
            for _ in range(rounds):
                for form, call in forms.items():
                    begin = time.perf_counter()
                    call()
                    times[form].append(time.perf_counter() - begin)
            total = 2 * LAYERS * batch * kv_heads * count * dim * kind.itemsize
            cells = [statistics.median(times[form]) for form in forms]
            table.add_row(
                f"{batch}",
                f"{count}",
                *(f"{1e3 * seconds:.2f} ({total / seconds / 1e9:.0f})" for seconds in cells),
                f"{total / bandwidth / cells[-1]:.0%}",
            )
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{LAYERS} layers, {heads} heads over {kv_heads} of {dim}, {dtype}, {slots} slots, {torch.get_num_threads()} "
        f"threads, copy bandwidth {bandwidth / 1e9:.1f} GB/s, {processor_name()}, torch {torch.__version__}; load of "
        f"the machine {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    typer.run(main)
