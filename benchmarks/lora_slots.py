"""Compare decode steps without an adapter, with one in a slot, and of a program without slots.

    python benchmarks/lora_slots.py --form compiled                     # 110M Llama, on the CPU
    python benchmarks/lora_slots.py --form executorch --layers 2 --vocab 1000

All programs are in one process, on one thread, and steps are interleaved, round by round. Times are of the processor,
which does not count other processes. "no slots" is a program of the same model without slots; "unused" has an empty
row, and "used" an adapter in each layer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from loop import MODELS
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from exportable_cache import export, load
from exportable_cache.common.native.machine_code import processor_name
from exportable_cache.models.loading.adapters import LoraWeights
from exportable_cache.session.session import Session

CACHE = 512


def opened(form: str, model: PreTrainedModel, slots: int, rank: int, targets: tuple[str, ...]) -> Session:
    """Return a session of a form: eager, compiled, or exported for a target."""
    room = {"lora_slots": slots, "lora_rank": rank, "lora_targets": targets if slots else ()}
    if form in ("eager", "compiled"):
        compile = "wait" if form == "compiled" else False
        return Session.from_model(model, max_cache_len=CACHE, compile=compile, buckets=False, **room)
    with tempfile.TemporaryDirectory() as folder:
        options = {"recipe": "portable"} if form == "executorch" else {}
        return load(
            export(model, form, CACHE, Path(folder) / "out", verify=False, prefill_chunk=8, **options, **room).path
        )


def loaded(session: Session, rank: int) -> None:
    """Fill a slot with random products."""
    slots = session._adapters.checked()
    tensors = {one.name: (torch.randn(rank, one.inputs), torch.randn(one.outputs, rank)) for one in slots.targets}
    session._adapters.load(session.runner, LoraWeights("random", tensors), "random")


def main(
    form: Annotated[str, typer.Option(help="eager, compiled, pt2 or executorch.")] = "compiled",
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "llama-110m",
    layers: Annotated[int, typer.Option(help="Layers; 0 for the model's.")] = 0,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary; 0 for the model's.")] = 0,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    target: Annotated[list[str] | None, typer.Option("--target", help="Layers with slots; all by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 20,
    steps: Annotated[int, typer.Option(help="Steps of each form per round.")] = 5,
) -> None:
    """Print the median milliseconds of a step, and the cost over a program without slots."""
    torch.set_num_threads(1)
    config = MODELS[model](CACHE)
    config.num_hidden_layers, config.vocab_size = layers or config.num_hidden_layers, vocab or config.vocab_size
    torch.manual_seed(0)
    sessions: dict[str, Session] = {}
    for name, slots in (("no slots", 0), ("unused", 4)):
        sessions[name] = opened(form, AutoModelForCausalLM.from_config(config).eval(), slots, rank, tuple(target or ()))
    sessions["used"] = sessions["unused"]
    loaded(sessions["used"], rank)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    token = torch.tensor([5])
    with torch.no_grad():
        for number in range(rounds + 1):
            # In both orders, because each form finds the caches as the one before left them.
            for name, session in list(sessions.items())[:: 1 if number % 2 else -1]:
                if slots := session.adapters:
                    session.use_adapter(slots[0] if name == "used" else None)
                session.reset()
                session.decode(token)
                start = time.process_time()
                for _ in range(steps):
                    session.decode(token)
                # The first round warms up.
                times[name] += [(time.process_time() - start) / steps] if number else []
    table = Table("form", "ms", "cost")
    median = {name: statistics.median(one) * 1000 for name, one in times.items()}
    for name, one in median.items():
        table.add_row(name, f"{one:.2f}", f"{one / median['no slots'] - 1:+.1%}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{form}, {model}, {config.num_hidden_layers} layers, rank {rank}, {', '.join(target or ['all layers'])}, one "
        f"thread, {processor_name()}; load of the machine {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    typer.run(main)
