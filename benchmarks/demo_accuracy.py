"""Measure the demo model's accuracy on its recall task: the eager model, every target, and a cache that forgets.

    python benchmarks/demo_accuracy.py --questions 500

All forms get the same held-out questions, whose fact lies further back than the sliding window. In the last row, every
layer's attention is cut to the window: what a wrong cache would score.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from exportable_cache import Session, export, load
from exportable_cache.demo import demo_path
from exportable_cache.demo.task import accuracy, make_questions

Answer = Callable[[str], str]


def transformers_answer(forgetful: bool = False) -> Answer:
    """Return the eager model's responses with `DynamicCache`; `forgetful` makes all layers sliding."""
    config = AutoModelForCausalLM.from_pretrained(demo_path()).config
    if forgetful:
        config = copy.deepcopy(config)
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_pretrained(demo_path(), config=config, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_path())

    def answer(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, past_key_values=DynamicCache(config=config), max_new_tokens=6, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return answer


def session_answer(session: Session) -> Answer:
    """Return a session's responses, from position 0 for each question."""

    def answer(prompt: str) -> str:
        session.reset()
        return "".join(session.stream_text(prompt, max_new_tokens=6))

    return answer


@torch.no_grad()
def main(
    questions: Annotated[int, typer.Option(help="Questions to ask.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the questions; training used others.")] = 20_000,
) -> None:
    """Print the accuracy of each form."""
    console = Console()
    window = AutoModelForCausalLM.from_pretrained(demo_path()).config.sliding_window
    asked = make_questions(questions, seed=seed, min_distance=window, tokens=(60, 300))
    forms: dict[str, Answer] = {"transformers eager, DynamicCache": transformers_answer()}
    with tempfile.TemporaryDirectory() as folder:
        for target in ("pt2", "executorch"):
            export("demo", target, 512, Path(folder) / target, verify=False)
            forms[f"ours, {target}"] = session_answer(load(Path(folder) / target))
        forms["every layer cut to the window"] = transformers_answer(forgetful=True)
        table = Table(
            title=f"{len(asked)} questions of {min(q.tokens for q in asked)} to {max(q.tokens for q in asked)} tokens, "
            f"the fact more than {window} back"
        )
        table.add_column("form")
        table.add_column("right", justify="right")
        for name, answer in forms.items():
            shown = track(asked, description=name, console=Console(stderr=True), transient=True)
            table.add_row(name, f"{100 * accuracy(answer, shown):.1f}%")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
