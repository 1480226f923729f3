"""Count what a decode step of a tensor-parallel session sends, on processes over gloo, compared with the minimum.

    python -m benchmarks.parallel          # from the repository's root, because it shares the tests' models
    python -m benchmarks.parallel --ranks 4 --family mixtral

Models are tiny, so only counts and ratios carry over: messages depend on the layers, bytes on the hidden size and,
where the logits are gathered, on the vocabulary. The minimum is two sums of one hidden state per layer, and the token.
`planned` is the count of `exportable-cache plan --tensor-parallel`, `sent` the least that a rank sends. No time is
measured, because ranks on one processor wait for each other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from exportable_cache.pipeline.plan import plan
from tests.parallel import checks
from tests.parallel.processes import run_ranks
from tests.parallel.test_families import FAMILIES, family


def main(
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    family_name: Annotated[list[str] | None, typer.Option("--family", help="Model types; all by default.")] = None,
) -> None:
    """Print a table in Markdown."""
    names = family_name or list(FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            family(name).save_pretrained(Path(folder) / name)
        found = run_ranks(Path(folder), ranks, (checks.families,))[0]["families"]
    if isinstance(found, str):
        raise SystemExit(found)
    print("| model | messages | planned | least | bytes handed over | sent | least handed over |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        config = family(name).config
        counts, handed_over = found[name]["sent"]
        planned = plan(config, checks.CAPACITY, tensor_parallel=ranks).tensor_parallel
        layers, size = config.num_hidden_layers, 4 * config.hidden_size
        print(
            f"| {name} | {sum(counts.values())} | {planned.messages} | {2 * layers + 1} "
            f"| {handed_over} | {planned.sent_bytes} | {2 * layers * size + 8} |"
        )


if __name__ == "__main__":
    typer.run(main)
