"""Run a continuous batch over pipeline stages, with a pipeline that empties at each step, and with one kept full.

    python -m benchmarks.stages          # from the repository's root, because it shares the tests' processes
    python -m benchmarks.stages --stages 4 --rows 16

The model is a random Llama with one thread per stage. `busy` is the share of the time in which a stage does not wait
for a message. Prompts are one token long, because they are prefilled between steps, which empties both pipelines.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from exportable_cache.decoding import ContinuousBatch
from exportable_cache.session.stepper import RowGroups
from tests.parallel.processes import Rank, run_ranks

CAPACITY, TOKENS = 128, 48
#: Calls in which a stage waits: `recv` and `broadcast` return with the message.
_WAITING = ("recv", "broadcast", "all_gather")


@contextmanager
def _waited() -> Iterator[list[float]]:
    """Return the seconds that this process has waited."""
    seconds: list[float] = []

    def timed(call: Any) -> Any:
        def wait(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = call(*given, **named)
            seconds.append(time.perf_counter() - begun)
            return result

        return wait

    patches = [mock.patch.object(dist, name, timed(getattr(dist, name))) for name in _WAITING]
    for patch in patches:
        patch.start()
    try:
        yield seconds
    finally:
        for patch in patches:
            patch.stop()


def served(me: Rank) -> dict[str, tuple[float, float]]:
    """Return the seconds of all requests, and the busy share of this stage, for both kinds of pipeline."""
    split = DistributedConfig(pp_size=me.size)
    model = AutoModelForCausalLM.from_pretrained(str(me.folder / "model"), distributed_config=split).eval()
    rows, found = int((me.folder / "rows").read_text()), {}
    batch = ContinuousBatch.from_model(model, CAPACITY, rows)
    batches = {"kept full": batch}
    with mock.patch.object(RowGroups, "__iter__", lambda groups: iter(())):
        batches["emptied"] = ContinuousBatch(batch.prefill, ContinuousBatch.from_model(model, CAPACITY, rows).decode)
    for again in range(2):
        for name, one in batches.items():
            for row in range(rows):
                one.submit(torch.tensor([[5 + row]]), TOKENS)
            dist.barrier()
            with _waited() as waits:
                begun = time.perf_counter()
                for _ in one.run():
                    pass
                seconds = time.perf_counter() - begun
            one.prefill.reset()
            # The first run allocates memory.
            if again:
                found[name] = (seconds, 1 - sum(waits) / seconds)
    return found


def main(
    stages: Annotated[int, typer.Option(help="Processes.")] = 2,
    rows: Annotated[int, typer.Option(help="Requests at a time.")] = 8,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 768,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
) -> None:
    """Print a Markdown table."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder) / "model")
        (Path(folder) / "rows").write_text(str(rows))
        found = [one.get("served") for one in run_ranks(Path(folder), stages, (served,))]
    if not all(isinstance(one, dict) for one in found):
        raise SystemExit("\n".join(map(str, found)))
    print("| pipeline | tokens/s | busy, stage by stage |")
    print("|---|---|---|")
    for name in ("emptied", "kept full"):
        busy = ", ".join(f"{one[name][1]:.0%}" for one in found)
        print(f"| {name} | {rows * TOKENS / found[0][name][0]:.0f} | {busy} |")


if __name__ == "__main__":
    typer.run(main)
