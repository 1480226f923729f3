"""The tables of published checkpoints, with which docs/architectures.md begins."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..check import RECIPES, TARGETS, is_asked
from ..shrink import BORDER, MOST_LAYERS
from . import FOLDER, LENGTHS, Checkpoint

#: Bytes of weights in bfloat16 up to which a recipe is advised: they leave room in 16 GB of memory.
_EXACT, _FAST = 8e9, 32e9
#: Columns of the tables, those of recipes next to their target.
_SHOWN = tuple(column for target in TARGETS for column in (target, *(RECIPES if target == "executorch" else ())))
#: The checkpoints with which the page begins, chosen by hand, by family and size.
MOST_RUN = (
    *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-VL-7B-Instruct"),
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    *("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    *("Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-27B"),
    *("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"),
    *("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-70B", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    *("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM3-3B"),
    *("google/gemma-2-2b", "google/gemma-3-1b-it", "google/gemma-3-4b-it", "google/gemma-3-27b-it"),
    *("google/gemma-3n-E4B", "google/gemma-4-E2B", "google/gemma-4-26B-A4B", "google/gemma-4-31B-it"),
    *("mistralai/Mistral-7B-v0.3", "mistralai/Ministral-3-8B-Base-2512", "mistralai/Mixtral-8x7B-v0.1"),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    *("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-4-mini-instruct", "microsoft/phi-4"),
    *("openai/gpt-oss-20b", "openai/gpt-oss-120b", "openai-community/gpt2", "openai/whisper-large-v3"),
    *("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V4-Flash"),
    *("zai-org/GLM-4.5-Air", "zai-org/GLM-4.7-Flash", "moonshotai/Kimi-K2-Instruct", "MiniMaxAI/MiniMax-M2.5"),
)


def lines_of_most_run(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return the section of the checkpoints that people run most, in the order of `MOST_RUN`.

    Args:
        results: Outcomes of each checkpoint, as `read_result` gives them.
    """
    named = {row.checkpoint: (row, facts) for row, facts in results.items()}
    listed = dict(named[name] for name in MOST_RUN if name in named)
    return [
        f"## Checkpoints that people run most ({len(listed)})",
        "",
        *_table(listed),
        "A number is the largest difference between our logits and those of the uncompiled model, for a small random model "
        "with the kinds",
        "of layers of the checkpoint. No weights of these checkpoints were run. An empty cell was not run; `-` does not "
        "apply.",
        "",
        f"Memory is that of the checkpoint at its true size in bfloat16, by `exportable-cache plan`: weights, and a cache "
        f"of {' and '.join(f'{tokens:,}' for tokens in LENGTHS)} tokens.",
        "The recipe is one for ExecuTorch in 16 GB of memory: `exact` for weights of up to 8 GB, `fast` (4 bits) of up "
        "to 32 GB; a larger model",
        "needs a session on GPUs, and a model that ExecuTorch refuses has none.",
        "",
    ]


def lines_of(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return the section of all other checkpoints, and the counts of all.

    Args:
        results: Outcomes of each checkpoint, as `read_result` gives them.
    """
    others = {row: facts for row, facts in results.items() if row.checkpoint not in MOST_RUN}
    sources = Counter(row.source.split(",")[0].split(" of ")[0] for row in results)
    types, unsized = {row.model_type for row in results}, sum(not row.sized for row in results)
    return [
        f"## Published checkpoints ({len(results)})",
        "",
        f"These and the checkpoints above cover {len(types)} model types. `tests/zoo/published` lists what the "
        "`config.json` of each sets and its class's",
        "default does not, with the source. The tiny model has the same kinds in the same order: at least one period of "
        "the pattern of layers",
        f"(up to {MOST_LAYERS}, then one of each kind), keys for all, half or one of the heads, the same RoPE; "
        f"LongRoPE, YaRN and Llama 3's RoPE begin at {BORDER} tokens,",
        "so each row passes every border. Groups of experts, limits of activations and soft caps are so small that they "
        "change logits. Cells are as in the tables below.",
        f"{unsized} rows have the kinds of the checkpoint, but not its sizes, so they show no memory: mostly the defaults of "
        "a class whose docstring",
        "names the checkpoint. Types whose checkpoints are encoders (BERT and its family) have no row.",
        f"Rows of model types that 5.23 does not have ran on transformers 5.24: {', '.join(_later(results)) or 'none'}.",
        "",
        *_counts(results),
        "",
        *_table(others),
        f"Sources of the facts: {', '.join(f'{name} ({count})' for name, count in sources.most_common())}.",
        "",
    ]


def _table(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return a row for each checkpoint, and the reasons of those that were refused."""
    reasons: list[str] = []
    rows = [_row(row, facts, reasons) for row, facts in results.items()]
    return [
        f"| checkpoint | model type | {' | '.join(_SHOWN)} | weights | {' | '.join(f'{tokens:,}' for tokens in LENGTHS)}"
        " | recipe |",
        "|---|---|" + "---|" * (len(_SHOWN) + len(LENGTHS) + 2),
        *rows,
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        *[""] * bool(reasons),
    ]


def _later(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    listed = {one["model_type"] for one in json.loads((FOLDER / "since_5_24.json").read_text())}
    return sorted({row.model_type for row in results} & listed)


def _counts(results: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    """Return the table of how many rows were run on each target, how they ended, and when the last one was run."""
    lines = ["| target | rows | run | pass | refused | wrong | error | last run |", "|---|---|---|---|---|---|---|---|"]
    for target in _SHOWN:
        asked = [facts["targets"].get(target) for row, facts in results.items() if is_asked(row, target)]
        run = [outcome for outcome in asked if outcome is not None]
        found = Counter(outcome["status"] for outcome in run)
        cells = [str(found[status]) for status in ("pass", "refused", "wrong", "error")]
        last = max((outcome.get("date", "") for outcome in run), default="")
        lines.append(f"| {target} | {len(asked)} | {len(run)} | {' | '.join(cells)} | {last} |")
    return lines


def _row(row: Checkpoint, facts: dict[str, Any], reasons: list[str]) -> str:
    cells = [_cell(facts["targets"].get(target), reasons) if is_asked(row, target) else "-" for target in _SHOWN]
    memory = facts.get("memory", {})
    sizes = [_size(memory.get(name)) for name in ("weights", *map(str, LENGTHS))]
    return f"| {row.checkpoint} | {row.model_type} | {' | '.join([*cells, *sizes])} | {_recipe(facts)} |"


def _cell(outcome: dict[str, Any] | None, reasons: list[str]) -> str:
    if outcome is None:
        return ""
    if outcome["status"] == "wrong":
        return f"**wrong** {outcome['difference']:.0e}"
    shown = f"{outcome['difference']:.0e}" if outcome["status"] == "pass" else outcome["status"]
    reason = outcome.get("reason", "").replace("|", "\\|").replace("\n", " ")
    if not reason:
        return shown
    if reason not in reasons:
        reasons.append(reason)
    return f"{shown} ({reasons.index(reason) + 1})"


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
