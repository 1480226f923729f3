"""Whether several decode steps per launch pay: compiled, one step at a time beside several, in one run.

    python benchmarks/launches.py                                      # the demo model, and a smaller one of two layers

Answers are generated in turns, round by round, so that a slow moment of the machine falls on all forms; every form must
give the same tokens. What a launch saves is the work outside of the graph: it is the same per step whatever the model's
size.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.models.loading.loading import load_model


def two_layers() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS = {"two layers": two_layers, "demo": lambda: load_model("demo").model}


def main(
    steps: Annotated[str, typer.Option(help="Steps per launch, beside one.")] = "2,4",
    tokens: Annotated[int, typer.Option(help="Per answer.")] = 97,
    rounds: Annotated[int, typer.Option(help="Answers per form.")] = 30,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Print milliseconds per token of each form, and how many times faster it is than one step at a time: medians."""
    forms = [1, *map(int, steps.split(","))]
    prompt = torch.arange(3, 11)[None]
    for name, make in MODELS.items():
        model = make()
        model.generation_config.eos_token_id = None
        sessions, first, seconds = {}, {}, {form: [] for form in forms}
        for form in forms:
            cache = ExportableCache.from_model(model, 128, rollback_slots=max(forms))
            begin = time.perf_counter()
            sessions[form] = Session.from_model(model, cache, compile="wait", buckets=False, steps_per_launch=form)
            answer = list(sessions[form].generate(prompt, tokens, temperature=temperature, seed=1))
            first[form] = time.perf_counter() - begin
            assert answer == first.setdefault("answer", answer), f"{form} steps per launch give other tokens"
        for _ in range(rounds):
            for form, session in sessions.items():
                session.reset()
                given = session.generate(prompt, tokens, temperature=temperature, seed=1)
                next(given)
                begin = time.perf_counter()
                for _ in given:
                    pass
                seconds[form].append((time.perf_counter() - begin) / (tokens - 1))
        for form in forms:
            gain = statistics.median(one / other for one, other in zip(seconds[1], seconds[form], strict=True))
            ms = 1000 * statistics.median(seconds[form])
            print(
                f"{name}: {form} per launch, {ms:.3f} ms per token, {gain:.2f}x, "
                f"first answer after {first[form]:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
