"""Compare compiled decoding with several steps per launch and with one, in one run.

    python benchmarks/launches.py                                      # the demo model, and a smaller one of two layers

Responses are generated interleaved, round by round, so that a slow moment of the machine affects all forms. Every form
must give the same tokens. A launch saves the work outside the graph, which is the same per step for any model size.
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
    """Return a random Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=512,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS = {"two layers": two_layers, "demo": lambda: load_model("demo").model}


def main(
    steps: Annotated[str, typer.Option(help="Steps per launch, compared with one.")] = "2,4",
    tokens: Annotated[int, typer.Option(help="Tokens per response.")] = 97,
    rounds: Annotated[int, typer.Option(help="Responses per form.")] = 30,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Print median milliseconds per token of each form, and the speed-up over one step per launch."""
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
