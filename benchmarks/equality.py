"""Print the largest logit difference to the eager model with `DynamicCache`, by family and target.

    python -m benchmarks.equality          # from the repository's root, because it shares the tests' models and oracle

Models are tiny, random, in float32, with a window of 8. Prompts have 3, 7, 8, 9 and 40 tokens, and 40 decode steps
follow each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from exportable_cache import Session
from tests.support.models import FAMILIES, tiny_model
from tests.support.sessions import live_session, lowered_session
from tests.test_equality import worst_difference

TARGETS = ("eager", "compiled", "pt2", "executorch")


def session_for(family: str, target: str, folder: Path) -> tuple[Session, torch.nn.Module]:
    """Return a session over a tiny model of a family, and the model."""
    model = tiny_model(family)
    if target in ("eager", "compiled"):
        return live_session(model, target == "compiled", 96), model
    return lowered_session(model, target, folder, 96), model


def main(families: Annotated[str, typer.Option(help="Comma-separated; all by default.")] = ",".join(FAMILIES)) -> None:
    """Print the table."""
    console = Console()
    table = Table(title="max |logit difference| to eager DynamicCache")
    table.add_column("family")
    for target in TARGETS:
        table.add_column(target, justify="right")
    for family in families.split(","):
        cells = []
        for target in TARGETS:
            torch._dynamo.reset()
            with console.status(f"{family}, {target}"), tempfile.TemporaryDirectory() as folder:
                session, model = session_for(family, target, Path(folder))
                cells.append(f"{max(worst_difference(session, model).values()):.1e}")
        table.add_row(family, *cells)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
