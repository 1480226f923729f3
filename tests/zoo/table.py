"""docs/architectures.md and .json, written from the results."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import GROUPS, LEFT_OUT, Architecture, architectures
from .build import PROMPTS, STEPS
from .check import BY_NAME, COLUMNS, FIXED_CHUNK, PEERS, TARGETS, is_asked, read_result
from .conditioning import MOST_MOVED, MOST_MOVED_SMOOTHLY, TOLERANCE
from .extended import LENGTHS, PROMPT, TAKEN_BACK
from .overrides import OVERRIDES
from .published import Checkpoint, checkpoints
from .published.table import lines_of, lines_of_most_run
from .shrink import HIDDEN, VOCAB, WINDOW
from .support_table import write_support

DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"
#: Columns of the table.
SHOWN = (*COLUMNS, *BY_NAME)
STATUSES = ("pass", "refused", "wrong", "lowered", "error")
TITLES = {
    "causal": "Causal language models",
    "image": "Text decoders of vision models",
    "audio": "Text decoders of audio models",
    "seq2seq": "Encoder-decoders",
    "speech": "Speech encoder-decoders",
}


EXTENDED_MEANS = (
    f"a session in eager mode and float32, for prompts of {', '.join(map(str, LENGTHS))} tokens, a second sequence of "
    "other tokens (and\nanother encoding) behind them, "
    f"{' and '.join(map(str, TAKEN_BACK))} tokens taken back past the window, and a fork that goes on by itself; then "
    f"a prompt of {PROMPT} in bfloat16\nand float16 against the same model in the same dtype over `DynamicCache`, and "
    "the bytes of each layer by the config alone. In half\nprecision a logit may differ by as much as those of the "
    "reference move if every weight is changed by its last bit. If that is more\nthan "
    f"{MOST_MOVED} roundings of the largest logit ({MOST_MOVED_SMOOTHLY} of a model that chooses nothing), or in float32 "
    "more than the tolerance, the reference is "
    "**ill-conditioned** (two experts or keys tie,\nand the order of a sum decides): then the same is asked of the "
    "model whose router takes every expert and whose indexer takes\nevery key. The cell counts checks passed; "
    "**unknown** have no sound reference, refused ones end with a sentence."
)


def write_table(folder: Path, document: Path = DOCUMENT) -> None:
    """Write the document from the results in `folder`, and the results as JSON next to it; cells of what was not run are empty.

    Results that the document has and the folder does not are kept, because a run may be of a few rows or targets.
    """
    path = document.with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    results = {row: _with_known(read_result(folder, row), known.get(row.name, {})) for row in architectures()}
    published = {row: _with_known(read_result(folder, row), known.get(row.name, {})) for row in checkpoints(later=True)}
    document.parent.mkdir(exist_ok=True)
    document.write_text("\n".join(_lines(results, published)) + "\n")
    every: dict[Architecture, dict[str, Any]] = {**results, **published}
    lines = ",\n".join(f"{json.dumps(row.name)}: {json.dumps(_kept(facts))}" for row, facts in every.items())
    document.with_suffix(".json").write_text(f"{{\n{lines}\n}}\n")
    if document == DOCUMENT:
        write_support()


def _with_known(facts: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    return {**known, **facts, "targets": {**known.get("targets", {}), **facts["targets"]}}


def _kept(facts: dict[str, Any]) -> dict[str, Any]:
    """Without where in the code an error came up."""
    return {**facts, "targets": {name: {**outcome, "where": []} for name, outcome in facts["targets"].items()}}


def _lines(results: dict[Architecture, dict[str, Any]], published: dict[Checkpoint, dict[str, Any]]) -> list[str]:
    prompts = ", ".join(" + ".join(map(str, pieces)) for pieces in PROMPTS)
    return [
        "# Every generative architecture of transformers",
        "",
        *lines_of_most_run(published),
        "## What a row shows",
        "",
        "Written by `make zoo`. Each row of the table of all architectures is a tiny random model of one architecture "
        "of transformers 5.23, made from its default",
        f"config by rule (hidden size {HIDDEN}, windows and chunks of {WINDOW}, few experts, vocabulary {VOCAB}; "
        f"{len(OVERRIDES)} of the",
        "configs and sub-configs need a field set by hand), with enough layers that every kind of layer appears.",
        "",
        f"**pass** means: for prompts of {prompts} tokens and {STEPS} single tokens after each, teacher-forced, no "
        "logit differs by more",
        f"than {TOLERANCE:.0e} from the same model in eager mode with `DynamicCache`; the largest difference is in "
        "the table. **refused**",
        "means that the package says no at construction, with the reason. **wrong** means other logits, **error** "
        "anything else.",
        "`compiled` goes through `torch.compile` with the `aot_eager` backend, one full graph per method and no "
        "recompilation allowed;",
        "`executorch` through a `.pte` on its runtime; both methods, prefill and decode, on every target. `tensorrt` "
        "is asked of decoders",
        "alone (no encoder-decoders): the networks that TensorRT makes its plans of, evaluated layer by layer on the "
        "CPU; no plan was",
        "built for the table, and no GPU has run one. `coreai` is asked of decoders, too: programs run in Apple's "
        "runtime on Linux.",
        "`static`, `openvino` and `mlx` are programs of ExecuTorch for devices, in chunks of "
        f"{FIXED_CHUNK} tokens for the first two: the static form",
        "in XNNPACK, OpenVINO's delegate, and MLX's, whose graph is evaluated on the CPU.",
        "Columns with `-4w` and `-8w` are programs with quantised weights, experts included, against the model that has the "
        "same ones; in brackets",
        "how far that is from the model before. Rows that 32 does not divide, which the true sizes do not have, are refused with `4w`.",
        "`executorch` calls the operators that ExecuTorch has, as `--recipe portable` does. `executorch-native` and "
        "`executorch-fast` are what `export` writes with",
        "nothing said, with this package's native operators, and with `--recipe fast`: 4-bit weights, and keys and values in "
        "8 bits. They are verified by",
        "`export` as for a user, the second against the model with the same weights, and in brackets is how far it is from "
        "the model before. Where the reference itself moves past the limit with the last bit of its weights, because experts "
        "or keys tie, the cell",
        "is of the tiny model that chooses all. An empty cell was not run, `-` was not asked.",
        "",
        f"`extended` is {EXTENDED_MEANS}",
        "",
        "`static_cache`, `exporter` and `dynamo` are what transformers itself has, with the same tokens and tolerance: "
        "the model in eager",
        "mode over `StaticCache`; of decoders `TorchExportableModuleForDecoderOnlyLM`, exported and fed token by token; "
        "and of these, for the",
        "longest prompt, the prefill and decode of `DynamoExporter` over a static cache, in the loop of the model's own "
        "`generate`. An error",
        "there is that of transformers' own code, the first line of it. `openvino_exporter` and `mlx_exporter` are its "
        "exporters for two devices:",
        "`OpenVINOExporter`, executed by OpenVINO 2026.4.1 in float32 (state inside, or passed by the caller where that "
        "does not pass), and the",
        'prefill and decode of `ExecutorchExporter(backend="mlx")`, evaluated on the CPU as `mlx` is. Of a sample of '
        "causal models (`--sample 7`);",
        "**lowered** programs are in several pieces, which cannot be evaluated.",
        "",
        f"`{DOCUMENT.with_suffix('.json').name}` beside this file has the same for programs, with the time each took "
        "and the commit it",
        "was found with.",
        "",
        *lines_of(published),
        "## Every architecture",
        "",
        *_counts(results),
        "",
        *_checks(results),
        "",
        *(
            line
            for group in GROUPS
            for line in _group(group, {row: facts for row, facts in results.items() if row.group == group})
        ),
        "## Left out",
        "",
        *(f"- `{model_type}`: {reason}." for model_type, reason in LEFT_OUT.items()),
    ]


@dataclass
class Costs:
    """What the columns took.

    Attributes:
        minutes: Of processors, of the columns so far.
        complete: Whether every result of these says them.
    """

    minutes: float = 0.0
    complete: bool = True

    def told(self, seconds: list[float | None]) -> str:
        """The minutes of one column; empty if no result says them, and with the number of those that do if some do not."""
        known = [each for each in seconds if each is not None]
        self.minutes += sum(known) / 60
        self.complete = self.complete and len(known) == len(seconds)
        if not known:
            return ""
        return f"{sum(known) / 60:.0f}" + ("" if len(known) == len(seconds) else f" ({len(known)} rows)")


def _counts(results: dict[Architecture, dict[str, Any]]) -> list[str]:
    lines = [
        f"| {len(results)} architectures | {' | '.join(STATUSES)} | not run | not asked | minutes | processor minutes |",
        "|---|" + "---|" * (len(STATUSES) + 4),
    ]
    total, complete, costs = 0.0, True, Costs()
    for target in SHOWN:
        asked = [facts for row, facts in results.items() if is_asked(row, target)]
        outcomes = [facts["targets"].get(target) for facts in asked]
        found = Counter(outcome["status"] for outcome in outcomes if outcome)
        minutes = sum(outcome["seconds"] for outcome in outcomes if outcome) / 60
        total += minutes
        complete = complete and None not in outcomes
        cells = [str(found[status]) for status in STATUSES]
        cost = costs.told([outcome.get("processor_seconds") for outcome in outcomes if outcome])
        rest = f"{outcomes.count(None)} | {len(results) - len(asked)} | {minutes:.0f} | {cost}"
        lines.append(f"| {target} | {' | '.join(cells)} | {rest} |")
    models = costs.told([facts.get("model processor seconds") for facts in results.values() if facts["targets"]])
    patched = sum(1 for facts in results.values() if facts.get("patches"))
    kinds = Counter(kind for facts in results.values() for kind in facts.get("layers", {}))
    return [
        *lines,
        "",
        "Minutes are of processes, of which two run at a time on 2 cores"
        + (f": about {total / 2:.0f} minutes for all." if complete else "; not everything has been run yet.")
        + " Processor minutes leave",
        "out what a process waits for while others run: "
        + (f"{costs.minutes:.0f} in all" if complete and costs.complete else "not every row tells them yet")
        + f", {models or 'an unknown part'} of them for models and references.",
        f"{patched} architectures go through patched functions of transformers (`exportable_cache/models/patches/`).",
        "Layer kinds, and architectures that have them: "
        + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        + ".",
    ]


def _checks(results: dict[Architecture, dict[str, Any]]) -> list[str]:
    """How each check of `extended` ended, what was refused, and what has no sound reference; peers that know more."""
    by_check: dict[str, Counter[str]] = {}
    refusals: Counter[tuple[str, str]] = Counter()
    unknown: dict[tuple[str, str], list[str]] = {}
    for row, facts in results.items():
        for name, found in facts.get("checks", {}).items():
            by_check.setdefault(name, Counter())[found["status"]] += 1
            if found["status"] == "refused":
                refusals[name, _without_places(found["reason"])] += 1
            if found["status"] == "unknown":
                unknown.setdefault((name, found["reason"]), []).append(row.name)
    if not by_check:
        return ["The checks of `extended` were not run."]
    ill = {name: sum(1 for facts in results.values() if name in facts.get("ill_conditioned", {})) for name in by_check}
    statuses = ("pass", "refused", "unknown", "wrong", "error")
    ahead = []
    for row, facts in results.items():
        found = {name: outcome["status"] for name, outcome in facts["targets"].items()}
        behind = [target for target in TARGETS if found.get(target, "pass") != "pass"]
        if behind and "pass" in map(found.get, PEERS):
            ahead.append(f"{row.name} ({', '.join(behind)})")
    return [
        f"| `extended` | {' | '.join(statuses)} | ill-conditioned at first |",
        "|---|" + "---|" * (len(statuses) + 1),
        *(
            f"| {name} | {' | '.join(str(found[status]) for status in statuses)} | {ill[name] or ''} |"
            for name, found in by_check.items()
        ),
        "",
        "Refused:",
        "",
        *(f"- {name}, {count}: {reason}" for (name, reason), count in refusals.most_common()),
        "",
        "Unknown:",
        "",
        *(f"- {name}, {', '.join(names)}: {reason}" for (name, reason), names in sorted(unknown.items())),
        "",
        "Rows that a peer passes and a target here does not: " + (", ".join(ahead) or "none") + ".",
    ]


def _without_places(reason: str) -> str:
    """One sentence for all lengths and layers."""
    return re.sub(r"\d+", "N", reason.splitlines()[0])


def _checks_cell(checks: dict[str, dict[str, Any]]) -> str:
    counts = Counter(found["status"] for found in checks.values())
    others = [f"{counts[status]} {status}" for status in ("refused", "unknown") if counts[status]]
    return ", ".join([str(counts["pass"]), *others])


def _group(group: str, results: dict[Architecture, dict[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    lines = [
        f"## {TITLES[group]} ({len(results)})",
        "",
        f"| model type | {' | '.join(SHOWN)} | layers | patches |",
        "|---|" + "---|" * (len(SHOWN) + 2),
    ]
    for row, facts in results.items():
        cells = []
        for target in SHOWN:
            outcome = facts["targets"].get(target)
            if target == "extended" and outcome and outcome["status"] == "pass":
                cells.append(_checks_cell(facts["checks"]))
            else:
                cells.append(_cell(outcome, reasons) if outcome or is_asked(row, target) else "-")
        layers = ", ".join(f"{count} {kind}" for kind, count in facts.get("layers", {}).items())
        patches = ", ".join(facts.get("patches") or [])
        lines.append(f"| {row.model_type} | {' | '.join(cells)} | {layers} | {patches} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return [*lines, "", *notes, ""]


def _cell(outcome: dict[str, Any] | None, reasons: dict[str, list[str]]) -> str:
    if outcome is None:
        return ""
    if outcome["status"] == "pass":
        distance = outcome.get("distance")
        return f"{outcome['difference']:.0e}" + ("" if distance is None else f" ({distance:.0e})")
    if outcome["status"] == "wrong":
        return f"**wrong** {outcome['difference']:.0e}"
    reason = outcome["reason"].replace("|", "\\|").replace("\n", " ")
    reasons.setdefault(reason, [])
    return f"{outcome['status']} ({list(reasons).index(reason) + 1})"
