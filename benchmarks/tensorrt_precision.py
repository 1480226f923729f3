"""Compare half-precision TensorRT networks with the model, and the model with itself in float32.

    python -m benchmarks.tensorrt_precision    # from the repository's root, because it shares the tests' models

Models are tiny and random, with a window of 8 and all experts active; prompts of 5 and 20 random tokens, 24 decode
steps after each, three seeds. Three sets of logits are computed from the same tokens: the eager model over
`DynamicCache`; the networks that TensorRT compiles, by the reference evaluator; and the eager model in float32 with the
weights of the half-precision one. If the networks are not farther from float32 than the eager model, their difference
is rounding on both sides.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.backends.tensorrt.evaluator.test_families import EVERY_EXPERT, FAMILIES, PROMPTS
from tests.backends.tensorrt.models import engine_model
from tests.backends.tensorrt.programs import network_session, program_of
from tests.support.models import tokens
from tests.support.oracle import fed, reference_logits

STEPS = 24
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def logits_of(family: str, dtype: torch.dtype, seeds: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits of the network, the eager model, and the eager model in float32, each [positions, vocab]."""
    from exportable_cache.backends.tensorrt.options import TensorRTOptions
    from exportable_cache.backends.tensorrt.target import engine_networks

    model = engine_model(family, dtype, **EVERY_EXPERT.get(family, {}))
    program = program_of(model)
    session = network_session(model, program, engine_networks(program, TensorRTOptions()))
    # Rounded to half precision, then widened.
    exact = engine_model(family, dtype, **EVERY_EXPERT.get(family, {})).float()
    rows: tuple[list[torch.Tensor], ...] = ([], [], [])
    for seed in seeds:
        for prompt in PROMPTS:
            ids = tokens(prompt + STEPS, seed=seed)
            session.reset()
            feeds = [
                session.prefill(piece) if piece.shape[1] > 1 else session.decode(piece[0]) for piece in fed(ids, prompt)
            ]
            rows[0].append(torch.cat(feeds).float())
            rows[1].append(reference_logits(model, ids, prompt)[0].float())
            rows[2].append(reference_logits(exact, ids, prompt)[0])
    return tuple(torch.cat(kind) for kind in rows)


def distance(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the largest and the RMS difference."""
    return f"{(a - b).abs().max():.1e} / {(a - b).square().mean().sqrt():.1e}"


@torch.no_grad()
def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(FAMILIES),
    seeds: Annotated[int, typer.Option(help="Token sequences of each length.")] = 3,
) -> None:
    """Print the table."""
    table = Table(title="|logit difference|, largest / root mean square")
    for title in ("family", "dtype", "network to eager", "eager to float32", "network to float32"):
        table.add_column(title)
    console = Console(width=140)
    for family in families.split(","):
        for name, dtype in DTYPES.items():
            with console.status(f"{family}, {name}"):
                network, eager, exact = logits_of(family, dtype, range(seeds))
            table.add_row(family, name, distance(network, eager), distance(eager, exact), distance(network, exact))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
