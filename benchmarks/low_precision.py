"""Compare compiled steps in half precision, and with weights quantized by torchao, with float32.

    python benchmarks/low_precision.py                                  # 110M Llama, cache 4096, on the CPU

Every form is a compiled session over the same random weights. Steps are interleaved, round by round, so that a slow
moment of the machine affects all of them. The distance is the RMS difference of logits from float32's.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import torch
import typer
from loop import MODELS, Step, our_step, random_model
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from exportable_cache.common.native.machine_code import processor_name


def eight_bits(model: PreTrainedModel) -> None:
    """Quantize to 8 bits, with one scale per row of a weight."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def four_bits(model: PreTrainedModel) -> None:
    """Quantize to 4 bits, with one scale per 32 weights."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


#: Functions that convert a form's float32 weights, in place.
FORMS: dict[str, Callable[[PreTrainedModel], object]] = {
    "float32": lambda model: None,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.to(torch.float16),
    "int8 weights": eight_bits,
    "int4 weights": four_bits,
    "int8 weights, bfloat16": lambda model: eight_bits(model.to(torch.bfloat16)),
    "int4 weights, bfloat16": lambda model: four_bits(model.to(torch.bfloat16)),
}


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "llama-110m",
    length: Annotated[int, typer.Option(help="Slots allocated.")] = 4096,
    positions: Annotated[list[int] | None, typer.Option("--position", help="100 and 4000 by default.")] = None,
    forms: Annotated[list[str] | None, typer.Option("--form", help="All by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of each form per round.")] = 4,
) -> None:
    """Print the median milliseconds of a step, the speed-up over float32, and the distance."""
    if unknown := set(forms or ()) - set(FORMS):
        raise typer.BadParameter(f"must be one of {', '.join(FORMS)}, got {sorted(unknown)}", param_hint="'--form'")
    tokens = torch.randint(0, 32000, (1, 1), generator=torch.Generator().manual_seed(0))
    called: dict[str, Step] = {}
    for name in dict.fromkeys(["float32", *(forms or FORMS)]):
        one = random_model(model, length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FORMS[name](one)
        called[name] = our_step(one, tokens, length)
    table = Table("form", "distance", *(f"@{position}" for position in positions or [100, 4000]))
    # Before any other step, because all sessions read the same empty cache.
    logits = {name: torch.cat([step(position) for position in range(6)]).float() for name, step in called.items()}
    columns = [milliseconds(called, position, rounds, steps) for position in positions or [100, 4000]]
    for name in called:
        distance = (logits[name] - logits["float32"]).pow(2).mean().sqrt() / logits["float32"].std()
        cells = [f"{column[name]:.1f} ms, {column['float32'] / column[name]:.2f}x" for column in columns]
        table.add_row(name, f"{distance:.1e}", *cells)
    console = Console(width=150)
    console.print(table)
    console.print(
        f"{model}, {torch.get_num_threads()} threads, {processor_name()}, torch {torch.__version__}, "
        f"torchao {metadata.version('torchao')}; load of the machine {os.getloadavg()[0]:.1f}"
    )


@torch.no_grad()
def milliseconds(called: dict[str, Step], position: int, rounds: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step of each form."""
    seconds: dict[str, list[float]] = {name: [] for name in called}
    for step in called.values():
        step(position)
    for _ in range(rounds):
        for name, step in called.items():
            for _ in range(steps):
                begin = time.perf_counter()
                step(position)
                seconds[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    typer.run(main)
