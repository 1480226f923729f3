"""The results of `tests.zoo.media` as a page: what passes by mechanism, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from .check import write_json
from .support_table import write_support

DOCUMENT = Path(__file__).parents[2] / "docs" / "media.md"
TARGETS = ("eager", "pt2", "executorch")
#: Of an outcome, in docs/media.json.
_KEPT = ("status", "difference", "reason")
_HEAD = """# Images, video and audio by architecture

Made by `make zoo-media` on transformers {version}: tiny random models of every architecture that takes images, video or audio, each kind
in prompts with one item, with two, and with one after a chunk of text. Logits of {steps} tokens are compared, teacher-forced, with the
whole model in eager attention. "pass" is a largest |logit difference| of at most 1e-4, or 1e-5 of logits above 10. Pixels, grids, sizes
and masks are made from the configs (`tests/zoo/media_items.py`); no processor has run.

{counts}

Mechanisms: *places*, embeddings replace placeholder tokens; *sizes*, grids, sizes or masks belong to an item and determine the program;
*features beside*, the decoder takes features in addition to the embeddings, by layer or for each token; *axes*, positions have several
axes; *sees item*, *sees prompt*, tokens of an item, or of the whole prompt, see each other; *cross-attention*, layers between those of
self-attention attend to items; *encoder*, the item is the input of an encoder-decoder's encoder, so a prompt has one. An empty cell was not run, because pt2 and ExecuTorch run what passes in eager sessions. If a reason is
about shapes or a missing argument, the input made from the config may be wrong: a processor's output was not tried.

"""


def write_media_table(results: Path, document: Path = DOCUMENT) -> None:
    """Write docs/media.md and docs/media.json from one JSON file an architecture."""
    from .media import STEPS

    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    if not found:
        return
    lines = [_HEAD.format(version=transformers.__version__, steps=STEPS, counts=_counts(found))]
    lines.append("| model type | kind | eager | pt2 | executorch | by |\n|---|---|---|---|---|---|")
    reasons: list[str] = []
    for name, kinds in found.items():
        for kind, targets in kinds.items():
            cells = [_cell(targets.get(target), reasons) for target in TARGETS]
            eager = targets.get("eager", {})
            by = eager.get("reason", "") if eager.get("status") == "pass" else ""
            lines.append(f"| `{name}` | {kind} | {' | '.join(cells)} | {by} |")
    lines.append("")
    lines += [f"{index + 1}. {reason}" for index, reason in enumerate(reasons)]
    document.write_text("\n".join(lines) + "\n")
    kept = {
        name: {
            kind: {target: {key: one[key] for key in _KEPT} for target, one in targets.items()}
            for kind, targets in kinds.items()
        }
        for name, kinds in found.items()
    }
    document.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    if document == DOCUMENT:
        write_support()


def take_up_media(results: Path, document: Path = DOCUMENT) -> None:
    """The committed results, for architectures that this clone has not run itself."""
    for name, kinds in json.loads(document.with_suffix(".json").read_text()).items():
        path = results / f"{name}.json"
        if not path.exists():
            write_json(path, kinds)


def _cell(outcome: dict[str, Any] | None, reasons: list[str]) -> str:
    if outcome is None:
        return ""
    if outcome["status"] == "pass":
        return "pass"
    reason = " ".join(outcome["reason"].replace("|", "\\|").split())[:300]
    if reason not in reasons:
        reasons.append(reason)
    return f"{outcome['status']} ({reasons.index(reason) + 1})"


def _counts(found: dict[str, Any]) -> str:
    lines = ["| | eager | pt2 | executorch |", "|---|---|---|---|"]
    families = {
        target: sum(
            any(kind.get(target, {}).get("status") == "pass" for kind in kinds.values()) for kinds in found.values()
        )
        for target in TARGETS
    }
    row = " | ".join(str(families[target]) for target in TARGETS)
    lines.append(f"| of {len(found)} model types, at least one kind passes | {row} |")
    for kind in ("image", "video", "audio"):
        cells = []
        for target in TARGETS:
            ran = [kinds[kind][target] for kinds in found.values() if target in kinds.get(kind, {})]
            cells.append(f"{sum(one['status'] == 'pass' for one in ran)} of {len(ran)} run")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    wrong = sum(
        one["status"] == "wrong" for kinds in found.values() for kind in kinds.values() for one in kind.values()
    )
    return "\n".join(lines) + f"\n\nWrong: {wrong or 'none'}."
