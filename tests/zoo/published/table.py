"""The table of published checkpoints, with which docs/architectures.md begins."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..check import TARGETS, is_asked
from ..shrink import BORDER, MOST_LAYERS
from . import FOLDER, LENGTHS, Checkpoint

#: Bytes of weights in bfloat16 up to which a recipe is advised: they leave room in 16 GB of memory.
_EXACT, _FAST = 8e9, 32e9


def lines_of(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return the section of all checkpoints.

    Args:
        results: What was found of each, as `read_result` gives it.
    """
    reasons: list[str] = []
    rows = [_row(row, facts, reasons) for row, facts in results.items()]
    sources = Counter(row.source.split(",")[0].split(" of ")[0] for row in results)
    return [
        f"## Published checkpoints ({len(results)})",
        "",
        "Each row is a checkpoint as it is published, of which `tests/zoo/published` lists what its `config.json` sets "
        "and its class's",
        "default does not, with the source. The tiny model has the same kinds in the same order: at least one period of "
        "the pattern of layers",
        f"(up to {MOST_LAYERS}, then one of each kind), the same shares of heads, the same RoPE; LongRoPE, YaRN and "
        f"Llama 3's RoPE begin at {BORDER} tokens,",
        "so each row passes every border. Cells are as in the tables below; an empty one was not run. No weights of "
        "these checkpoints were run.",
        f"Rows of model types that 5.23 does not have ran on transformers 5.24: {', '.join(_later(results)) or 'none'}.",
        "",
        "Memory is that of the checkpoint at its true size in bfloat16, by `exportable-cache plan`: weights, and a cache "
        f"of {' and '.join(f'{tokens:,}' for tokens in LENGTHS)} tokens; `-` if the model has fewer positions.",
        "The recipe is one for ExecuTorch in 16 GB of memory: `exact` for weights of up to 8 GB, `fast` (4 bits) of up "
        "to 32 GB; a larger model",
        "needs a session on GPUs, and a model that ExecuTorch refuses has none.",
        "",
        *_counts(results),
        "",
        f"| checkpoint | model type | {' | '.join(TARGETS)} | weights | {' | '.join(f'{tokens:,}' for tokens in LENGTHS)}"
        " | recipe |",
        "|---|---|" + "---|" * (len(TARGETS) + len(LENGTHS) + 2),
        *rows,
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        f"Sources of the facts: {', '.join(f'{name} ({count})' for name, count in sources.most_common())}.",
        "",
    ]


def _later(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    listed = {one["model_type"] for one in json.loads((FOLDER / "since_5_24.json").read_text())}
    return sorted({row.model_type for row in results} & listed)


def _counts(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return the table of how many rows were run on each target, how they ended, and when the last one was run."""
    lines = ["| target | rows | run | pass | refused | wrong | error | last run |", "|---|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        asked = [facts["targets"].get(target) for row, facts in results.items() if is_asked(row, target)]
        run = [outcome for outcome in asked if outcome is not None]
        found = Counter(outcome["status"] for outcome in run)
        cells = [str(found[status]) for status in ("pass", "refused", "wrong", "error")]
        last = max((outcome.get("date", "") for outcome in run), default="")
        lines.append(f"| {target} | {len(asked)} | {len(run)} | {' | '.join(cells)} | {last} |")
    return lines


def _row(row: Checkpoint, facts: dict[str, Any], reasons: list[str]) -> str:
    cells = [_cell(facts["targets"].get(target), reasons) if is_asked(row, target) else "-" for target in TARGETS]
    memory = facts.get("memory", {})
    sizes = [_size(memory.get(name)) for name in ("weights", *map(str, LENGTHS))]
    return f"| {row.checkpoint} | {row.model_type} | {' | '.join([*cells, *sizes])} | {_recipe(facts)} |"


def _cell(outcome: dict[str, Any] | None, reasons: list[str]) -> str:
    if outcome is None or outcome["status"] == "pass":
        return "" if outcome is None else f"{outcome['difference']:.0e}"
    if outcome["status"] == "wrong":
        return f"**wrong** {outcome['difference']:.0e}"
    reason = outcome["reason"].replace("|", "\\|").replace("\n", " ")
    if reason not in reasons:
        reasons.append(reason)
    return f"{outcome['status']} ({reasons.index(reason) + 1})"


def _size(size: int | None) -> str:
    if not size:
        return "-"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _recipe(facts: dict[str, Any]) -> str:
    weights = facts.get("memory", {}).get("weights")
    if not weights:
        return ""
    if facts["targets"].get("executorch", {}).get("status") == "refused":
        return "-"
    return "exact" if weights <= _EXACT else "fast" if weights <= _FAST else "-"
