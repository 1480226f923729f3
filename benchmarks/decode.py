"""Compare the decode speed of every form of one random Llama in one process; ratios are what counts.

    python benchmarks/decode.py                       # 110M parameters, cache of 1024, positions 100 and near the end
    python benchmarks/decode.py --max-cache-len 4096 --json results.json

Rounds are interleaved: each round times a few steps of every form, so that a slow moment of the machine affects all of
them. The time of a decode step depends on the position and not on the cache's contents, so positions are set, not
generated.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

# Set before torch starts its threads, because idle ones must not spin while ExecuTorch's thread pool works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.program.methods import method_for

SIZES = {
    "10m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 8000},
    "110m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000},
}
Step = Callable[[int], object]


def random_llama(size: str, positions: int) -> PreTrainedModel:
    """Return a random float32 Llama with 12 query heads over 4 key heads (8 over 2 in the small one)."""
    torch.manual_seed(0)
    heads = (
        {"num_attention_heads": 12, "num_key_value_heads": 4}
        if size == "110m"
        else {"num_attention_heads": 8, "num_key_value_heads": 2}
    )
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], **heads, max_position_embeddings=positions)).eval()


def dynamic_step(model: PreTrainedModel, length: int) -> Step:
    """Step transformers eagerly with `DynamicCache`, filled up to a position once; `crop` takes back each step."""
    filled: dict[int, DynamicCache] = {}

    def step(position: int) -> object:
        if position not in filled:
            filled.clear()
            cache = DynamicCache(config=model.config)
            heads, dim = model.config.num_key_value_heads, model.config.head_dim
            for layer in range(model.config.num_hidden_layers):
                cache.update(torch.zeros(1, heads, position, dim), torch.zeros(1, heads, position, dim), layer)
            filled[position] = cache
        logits = model(torch.ones(1, 1, dtype=torch.int64), past_key_values=filled[position]).logits
        filled[position].crop(-1)
        return logits

    return step


def static_step(model: PreTrainedModel, length: int) -> Step:
    """Step transformers with `StaticCache`, compiled as its documentation says: fullgraph, static shapes."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    cache.early_initialization(1, model.config.num_key_value_heads, model.config.head_dim, torch.float32, "cpu")
    compiled = torch.compile(model, fullgraph=True, dynamic=False)

    def step(position: int) -> object:
        for layer in cache.layers:
            layer.cumulative_length.fill_(position)
        return compiled(
            torch.ones(1, 1, dtype=torch.int64),
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits

    return step


def session_step(session: Session) -> Step:
    """Step one of our sessions."""
    token, runner = torch.ones(1, 1, dtype=torch.int64), session.runner
    return lambda position: runner.run(method_for(runner.methods, 1, position + 1), token, torch.tensor([position]))


@torch.no_grad()
def main(
    size: Annotated[str, typer.Option(help="10m or 110m parameters.")] = "110m",
    max_cache_len: Annotated[int, typer.Option(help="Slots allocated.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 8,
    steps: Annotated[int, typer.Option(help="Steps of each form per round.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Print milliseconds per decoded token, and each form's speed relative to eager DynamicCache."""
    console = Console()
    model = random_llama(size, max_cache_len)
    positions = [100, max_cache_len - 2]
    forms: dict[str, Step] = {"transformers eager, DynamicCache": dynamic_step(model, max_cache_len)}
    with tempfile.TemporaryDirectory() as folder, console.status("preparing") as status:
        for target in ("pt2", "executorch"):
            status.update(f"exporting {target}")
            export(model, target, max_cache_len, Path(folder) / target, verify=False)
            forms[f"ours, {target}"] = session_step(load(Path(folder) / target))
        status.update("compiling")
        forms["transformers compiled, StaticCache"] = static_step(LlamaForCausalLM(model.config).eval(), max_cache_len)
        ours = LlamaForCausalLM(model.config).eval()
        forms["ours, compiled"] = session_step(
            Session.from_model(ours, ExportableCache.from_model(ours, max_cache_len), compile="wait")
        )
        times: dict[tuple[str, int], list[float]] = {}
        for position in positions:
            for step in forms.values():
                step(position)
            for done in range(rounds):
                status.update(f"position {position}, round {done + 1} of {rounds}")
                for name, step in forms.items():
                    for _ in range(steps):
                        start = time.perf_counter()
                        step(position)
                        times.setdefault((name, position), []).append(1e3 * (time.perf_counter() - start))
    medians = {key: statistics.median(values) for key, values in times.items()}
    base = next(iter(forms))
    table = Table(
        title=f"Llama {size}, float32, cache {max_cache_len}, {torch.get_num_threads()} threads: decode, median"
    )
    table.add_column("form")
    for position in positions:
        table.add_column(f"ms @{position}", justify="right")
        table.add_column("speed", justify="right")
    for name in forms:
        cells = [(f"{medians[name, p]:.1f}", f"{medians[base, p] / medians[name, p]:.2f}x") for p in positions]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    console.print(table)
    if json_path is not None:
        rows = [{"form": name, "position": position, "ms": ms} for (name, position), ms in medians.items()]
        json_path.write_text(json.dumps({"size": size, "max_cache_len": max_cache_len, "rows": rows}, indent=2))


if __name__ == "__main__":
    typer.run(main)
