"""Kinds of decoders, and a sample with equally many of each: `python -m tests.zoo.run --sample 7`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .architectures import Architecture
from .conditioning import CHOICES
from .shrink import tiny_config
from .support_table import DOCUMENT

KINDS = ("dense", "windows", "experts", "latent keys", "recurrent", "hybrid")


def kind_of(row: Architecture, layers: Sequence[str]) -> str:
    """Return the kind of a decoder, a string of `KINDS`.

    Args:
        row: The architecture.
        layers: Labels of its layers, as docs/architectures.json has them.
    """
    if any("recurrent" in label or "states" in label for label in layers):
        return "recurrent" if set(layers) <= {"recurrent", "none"} else "hybrid"
    fields = vars(tiny_config(row.shrinks).get_text_config(decoder=True))
    if fields.get("kv_lora_rank"):
        return "latent keys"
    if any(isinstance(fields.get(name), int) and fields[name] > 1 for name in CHOICES):
        return "experts"
    return "dense" if set(layers) <= {"full"} else "windows"


def kinds(rows: Sequence[Architecture]) -> dict[str, str]:
    """Return the kind of each row by its name, without rows that run on no target."""
    known: dict[str, Any] = json.loads((DOCUMENT.parent / "architectures.json").read_text())
    layers = {row: known.get(row.name, {}).get("layers") for row in rows}
    return {row.name: kind_of(row, list(labels)) for row, labels in layers.items() if labels}


def sample(rows: Sequence[Architecture], count: int) -> list[Architecture]:
    """Return up to `count` rows of each kind, evenly spaced in the order of their names."""
    found = kinds(rows)
    chosen: set[str] = set()
    for kind in KINDS:
        names = sorted(name for name, one in found.items() if one == kind)
        taken = min(count, len(names))
        chosen.update(names[index * len(names) // taken] for index in range(taken))
    return [row for row in rows if row.name in chosen]
