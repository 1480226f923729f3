"""The section `Models` of docs/support.md, from the JSON files of docs/."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "support.md"
_TARGETS = ("eager", "compiled", "pt2", "executorch", "executorch-native", "executorch-fast")
#: Names of columns that are no target.
_NAMES = {
    "eager": "eager",
    "compiled": "compiled",
    "executorch-native": "`executorch`, native operators",
    "executorch-fast": "`executorch`, `--recipe fast`",
}
#: Columns that are asked of decoders alone.
_DECODERS = {
    "tensorrt": "`tensorrt`, evaluated",
    "tensorrt-4w": "`tensorrt` with `--quantize 4w`, evaluated",
    "tensorrt-8w": "`tensorrt` with `--quantize 8w`, evaluated",
    "coreai": "`coreai`, executed on Linux",
    "static": "static form, executed by XNNPACK",
    "openvino": "`openvino`, executed",
    "openvino-4w": "`openvino` with `--quantize 4w`, executed",
    "openvino-8w": "`openvino` with `--quantize 8w`, executed",
    "mlx": "`mlx`, evaluated",
    "mlx-4w": "`mlx` with `--quantize 4w`, evaluated",
    "mlx-8w": "`mlx` with `--quantize 8w`, evaluated",
}
_PEERS = {
    "static_cache": "`StaticCache`, eager",
    "exporter": "`TorchExportableModuleForDecoderOnlyLM`",
    "dynamo": "`DynamoExporter`, static cache",
}
#: Exporters of transformers for devices, with the column of the same device here.
_DEVICE_PEERS = {
    "openvino_exporter": ("`OpenVINOExporter`, executed", "openvino"),
    "mlx_exporter": ('`ExecutorchExporter(backend="mlx")`, evaluated', "mlx"),
}


def write_support(document: Path = DOCUMENT) -> None:
    """Write the section of models from the results that docs/ has, and leave the rest of the document unchanged."""
    text = document.read_text()
    document.write_text(text[: text.index("## Models")] + "\n".join(_lines()) + "\n")


def _lines() -> list[str]:
    found = _of("architectures")
    rows = {name: facts["targets"] for name, facts in found.items()}
    published = {name: facts for name, facts in rows.items() if name.startswith("published-")}
    types = {name: facts for name, facts in rows.items() if name not in published}
    media, processors = _of("media"), _of("media_published")
    anchor = f"architectures.md#published-checkpoints-{len(published)}"
    # Programs were run for what passes in eager sessions; the columns of recipes for fewer.
    asked = "eager", "pt2", "executorch"
    by_type = {
        name: {
            target: {"status": _best(kinds, target)}
            for target in _TARGETS
            if target in asked or any(target in kind for kind in kinds.values())
        }
        for name, kinds in media.items()
    }
    pt2 = _statuses(types, "pt2")
    dates = (outcome.get("date", "") for facts in published.values() for outcome in facts.values())
    last = max(dates, default="")
    return [
        "## Models",
        "",
        f"| | models | {' | '.join(_NAMES.get(target, f'`{target}`') for target in _TARGETS)} |",
        "|---|---|" + "---|" * len(_TARGETS),
        f"| [generative architectures](architectures.md) of transformers 5.23 | {_row(types)} |",
        f"| [published checkpoints]({anchor}), shrunk | {_row(published)} |",
        f"| [model types with images, video or audio](media.md) | {_row(by_type)} |",
        f"| [published processors](media.md#published-processors-{len(processors)}), true sizes | {_row(processors)} |",
        "",
        "A pass means that the logits of a tiny random model equal the eager model's to 1e-4; with `--recipe fast`, that "
        "they are within",
        "the limits by which `export` verifies programs that round. `executorch` alone calls the operators that ExecuTorch has. The "
        "others are refused with a",
        f"reason, or were not run; in these columns {_wrong([*types.values(), *published.values()], media)}. Four "
        "architectures, whose tokens are several "
        "ids, run as programs but not as",
        f"bundles. Published checkpoints were last run on {last}.",
        "",
        "Of the architectures, these decoders were run for devices. `export` compares each program with its model, and "
        "writes none with wrong logits:",
        "",
        "| | run | pass | refused | wrong logits | error |",
        "|---|---|---|---|---|---|",
        *(
            f"| {title} | {_counted(types, target, ('pass', 'refused', 'wrong', 'error'))} |"
            for target, title in _DECODERS.items()
            if _statuses(types, target)
        ),
        "",
        "With the same tokens and tolerance, transformers 5.23 itself gives:",
        "",
        "| | architectures | pass | wrong logits | error |",
        "|---|---|---|---|---|",
        *(f"| {title} | {_counted(types, peer, ('pass', 'wrong', 'error'))} |" for peer, title in _PEERS.items()),
        f"| **exportable_cache**, `pt2` | {pt2.total()} | {pt2['pass']} | {pt2['wrong']} | {pt2['error']} "
        f"({pt2['refused']} refused) |",
        *_of_device_peers(types),
    ]


def _of_device_peers(types: dict[str, Any]) -> list[str]:
    """Return what transformers' exporters for devices give for a sample of decoders, next to this package's columns."""
    # Not at the top, because that module reads this one's path.
    from .architectures import architectures
    from .sample import KINDS, kinds

    shown = {peer: {name: facts for name, facts in types.items() if peer in facts} for peer in _DEVICE_PEERS}
    if not all(shown.values()):
        return []
    by_kind = kinds([row for row in architectures() if any(row.name in rows for rows in shown.values())])
    totals = [
        f"| {title} | {_counted(shown[peer], peer, ('pass', 'wrong', 'lowered', 'error'))} "
        f"| {_counted(shown[peer], own, ('pass', 'refused', 'wrong'))} |"
        for peer, (title, own) in _DEVICE_PEERS.items()
    ]
    lines = []
    for kind in KINDS:
        cells = []
        for peer, (_, own) in _DEVICE_PEERS.items():
            rows = {name: facts for name, facts in shown[peer].items() if by_kind.get(name) == kind}
            cells += [
                f"{_statuses(rows, column)['pass']} of {_statuses(rows, column).total()}" for column in (peer, own)
            ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return [
        "",
        "Its exporters for two devices, for a sample of decoders with up to seven of each kind "
        "(`python -m tests.zoo.run --sample 7 --targets",
        "openvino_exporter,mlx_exporter`), next to this package for the same rows. OpenVINO was 2026.4.1 for the first, "
        "which imports what",
        "2025.4.1 lacks, with its precision set to float32:",
        "",
        "| | run | pass | wrong logits | not evaluated | error | run here | pass | refused | wrong logits |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *totals,
        "",
        "*Not evaluated*: the program is in several pieces, with operators of ExecuTorch between, or takes inputs that "
        "the script does not know. An *error*",
        "is raised by the exporter, the runtime or the model. [Architectures](architectures.md) has each row. By kinds, those that pass:",
        "",
        "| | `OpenVINOExporter` | `openvino` here | MLX exporter | `mlx` here |",
        "|---|---|---|---|---|",
        *lines,
    ]


def _of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCUMENT.parent / f"{name}.json").read_text())
    return found


def _wrong(rows: list[dict[str, Any]], media: dict[str, Any]) -> str:
    """Return how many programs are wrong; `export` writes none of those of recipes."""
    every = [*rows, *(kind for kinds in media.values() for kind in kinds.values())]
    count = sum(facts[target]["status"] == "wrong" for facts in every for target in _TARGETS if target in facts)
    if not count:
        return "none gives wrong logits"
    return f"{count} differ{'s' if count == 1 else ''} from the model by more, of which `export` writes no bundle"


def _statuses(rows: dict[str, Any], target: str) -> Counter[str]:
    return Counter(facts[target]["status"] for facts in rows.values() if target in facts)


def _row(rows: dict[str, Any]) -> str:
    """Return the number of rows, and how many pass on each target; `-` where a target was not run."""
    counts = [_statuses(rows, target) for target in _TARGETS]
    cells = [
        "-"
        if not count
        else str(count["pass"])
        if count.total() == len(rows)
        else f"{count['pass']} of {count.total()}"
        for count in counts
    ]
    return " | ".join([str(len(rows)), *cells])


def _counted(rows: dict[str, Any], target: str, statuses: tuple[str, ...]) -> str:
    count = _statuses(rows, target)
    return " | ".join(map(str, (count.total(), *(count[status] for status in statuses))))


def _best(kinds: dict[str, Any], target: str) -> str:
    """Return `pass` if one kind of a model type passes on a target."""
    return "pass" if any(kind.get(target, {}).get("status") == "pass" for kind in kinds.values()) else "refused"
