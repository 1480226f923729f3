"""The results of `tests.zoo.media` as a page: what passes by mechanism, what is refused and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from .check import RECIPES, write_json
from .support_table import write_support

DOCUMENT = Path(__file__).parents[2] / "docs" / "media.md"
TARGETS = ("eager", "pt2", "executorch")
#: Those of the table of architectures, with what `export` writes by default.
_SHOWN = (*TARGETS, *RECIPES)
#: Outcomes of published processors, by checkpoint and target.
PUBLISHED = DOCUMENT.with_name("media_published.json")
#: Of an outcome, in docs/media.json.
KEPT = ("status", "difference", "reason")
_PROCESSORS = """
## Published processors ({count})

Items are made by the image processor or feature extractor of each checkpoint, with its published settings, from random pixels and
samples. Images, tiles, patches and frames have their true sizes; widths and depths of the model are shrunk. Prompts have one item, and
two of the same size. A session for one size must refuse items of the others with the name of the input. Cells are the largest |logit
difference|. pt2 and ExecuTorch run the first size, with one item; an empty cell was not run. No tokenizer ran: one text token stands between
rows of patches (Pixtral, Mistral 3), and between tiles (Idefics 3, SmolVLM).

| checkpoint | model type | eager | pt2 | executorch | embeddings of an item |
|---|---|---|---|---|---|
"""
_HEAD = """# Images, video and audio by architecture

Made by `make zoo-media` on transformers {version}: tiny random models of every architecture that takes images, video or audio, each kind
in prompts with one item, with two, and with one after a chunk of text. Logits of {steps} tokens are compared, teacher-forced, with the
whole model in eager attention. "pass" is a largest |logit difference| of at most 1e-4, or 1e-5 of logits above 10. `executorch-native` and `executorch-fast` are bundles that
`export` wrote and verified, with nothing said and with `--recipe fast`; the second are compared with the model that has the same weights,
within twice what rounding moves its logits. Pixels, grids, sizes and masks are made from the configs (`tests/zoo/media_items.py`); no processor has run.

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

    read = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    # Some types of transformers' mappings take neither images nor video nor audio.
    found = {name: kinds for name, kinds in read.items() if kinds}
    if not found:
        return
    lines = [_HEAD.format(version=transformers.__version__, steps=STEPS, counts=_counts(found))]
    lines.append(f"| model type | kind | {' | '.join(_SHOWN)} | by |\n|---|---|---|{'---|' * len(_SHOWN)}")
    reasons: list[str] = []
    for name, kinds in found.items():
        for kind, targets in kinds.items():
            cells = [_cell(targets.get(target), reasons) for target in _SHOWN]
            eager = targets.get("eager", {})
            by = eager.get("reason", "") if eager.get("status") == "pass" else ""
            lines.append(f"| `{name}` | {kind} | {' | '.join(cells)} | {by} |")
    lines.append("")
    lines += [f"{index + 1}. {reason}" for index, reason in enumerate(reasons)]
    document.write_text("\n".join(lines) + "\n" + _processors())
    kept = {
        name: {
            kind: {target: {key: one[key] for key in KEPT} for target, one in targets.items()}
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


def _processors() -> str:
    """Return the section of published processors, with the source of each."""
    from .processors import published

    results: dict[str, Any] = json.loads(PUBLISHED.read_text())
    rows = {row.checkpoint: row for row in published() if row.checkpoint in results}
    lines, reasons = [], []
    for name, row in rows.items():
        targets = results[name]
        cells = [_difference(targets.get(target), reasons) for target in TARGETS]
        counted = targets["eager"]["reason"] if targets["eager"]["status"] == "pass" else ""
        lines.append(f"| {name} | {row.model_type} | {' | '.join(cells)} | {counted} |")
    lines += ["", *(f"{index + 1}. {reason}" for index, reason in enumerate(reasons)), ""] if reasons else [""]
    lines += ["Sources:", ""]
    lines += [f"- {name}: {row.source}" for name, row in rows.items()]
    return _PROCESSORS.format(count=len(rows)) + "\n".join(lines) + "\n"


def _difference(outcome: dict[str, Any] | None, reasons: list[str]) -> str:
    passes = outcome is not None and outcome["status"] == "pass"
    return f"{outcome['difference']:.0e}" if outcome is not None and passes else _cell(outcome, reasons)


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
    lines = [f"| | {' | '.join(_SHOWN)} |", f"|---|{'---|' * len(_SHOWN)}"]
    cells = []
    for target in _SHOWN:
        passed = sum(
            any(kind.get(target, {}).get("status") == "pass" for kind in kinds.values()) for kinds in found.values()
        )
        ran = sum(any(target in kind for kind in kinds.values()) for kinds in found.values())
        cells.append(f"{passed} of {ran} run" if target in RECIPES else str(passed))
    lines.append(f"| of {len(found)} model types, at least one kind passes | {' | '.join(cells)} |")
    for kind in ("image", "video", "audio"):
        cells = []
        for target in _SHOWN:
            ran = [kinds[kind][target] for kinds in found.values() if target in kinds.get(kind, {})]
            cells.append(f"{sum(one['status'] == 'pass' for one in ran)} of {len(ran)} run")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    wrong = sum(
        one["status"] == "wrong" for kinds in found.values() for kind in kinds.values() for one in kind.values()
    )
    return "\n".join(lines) + f"\n\nWrong: {wrong or 'none'}."
