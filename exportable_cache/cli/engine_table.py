"""The table of a bundle's TensorRT engines: a plan itself shows nothing without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .layer_table import simple_table

if TYPE_CHECKING:
    from ..bundle.entries import File


def engine_table(files: Mapping[str, File]) -> Table:
    """One line per engine: what it was built for, its optimisation profile, and what its network consists of."""
    columns = ("layers", "cache updates", "attention layers", "in place")
    table = simple_table("engine", "built with", "for", "new tokens, least/usual/most", *columns, right=columns)
    for record in engines(files):
        layers = record["layers"]
        state = [tensor for tensor in record["inputs"] if tensor["name"].startswith("cache.")]
        table.add_row(
            record["method"],
            record["builder"],
            "SM " + ", ".join(map(str, record["capabilities"])) if record["capabilities"] else "portable",
            _profile(record["inputs"]),
            str(sum(layers.values())),
            str(layers.get("KV_CACHE_UPDATE", 0)),
            str(layers.get("ATTENTION_INPUT", 0)),
            f"{len(record['aliases'])} of {len(state)} tensors",
        )
    return table


def engines(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """The records of all engines in a bundle's files."""
    return [record for file in files.values() for record in file.details.get("engines", [])]


def _profile(inputs: list[Mapping[str, Any]]) -> str:
    """`2/256/256`, of the token ids."""
    ids = next(tensor for tensor in inputs if tensor["name"] == "input_ids")
    sizes = [ids[shape][1] for shape in ("min_shape", "opt_shape", "max_shape")]
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
