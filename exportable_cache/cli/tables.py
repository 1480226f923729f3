"""Tables of cache layers and of TensorRT engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..common.progress import bytes_text
from ..errors import shown

if TYPE_CHECKING:
    from ..bundle.manifest import File


@dataclass(frozen=True)
class LayerRow:
    """A row of the layer table. Sizes that a layer does not have are None."""

    layer_type: str
    policy: str
    slots: int | None
    heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    dtype: str
    bytes: int


def layer_table(rows: Iterable[LayerRow]) -> Table:
    """Return a table with one line per run of equal layers."""
    table = simple_table(
        "layer", "type", "policy", "slots", "heads", "dim", "dtype", "bytes", right=("slots", "heads", "dim", "bytes")
    )
    for first, count, row in _runs(rows):
        table.add_row(
            str(first) if count == 1 else f"{first}-{first + count - 1}",
            row.layer_type,
            row.policy,
            _number(row.slots),
            _number(row.heads),
            _head_dims(row),
            row.dtype,
            bytes_text(row.bytes) if count == 1 else f"{count} x {bytes_text(row.bytes)}",
        )
    return table


class _Table(Table):
    """A table with one line per row, so that control characters in cells are escaped."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(shown(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def simple_table(*headers: str, right: Collection[str] = ()) -> Table:
    """Return a table without frames.

    Args:
        headers: Headers of the columns.
        right: Headers of the columns to align right.
    """
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    return table


def _runs(rows: Iterable[LayerRow]) -> Iterator[tuple[int, int, LayerRow]]:
    first = 0
    for row, run in groupby(rows):
        count = sum(1 for _ in run)
        yield first, count, row
        first += count


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _head_dims(row: LayerRow) -> str:
    if row.head_dim == row.value_head_dim:
        return _number(row.head_dim)
    return f"K {_number(row.head_dim)}, V {_number(row.value_head_dim)}"


def engine_table(files: Mapping[str, File]) -> Table:
    """Return a table with one line per engine: builder, optimization profile, and counts of its network."""
    columns = ("layers", "cache updates", "attention layers", "products", "in place")
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
            "TF32" if record.get("products") == "tf32" else "stored dtype",
            f"{len(record['aliases'])} of {len(state)} tensors",
        )
    return table


def engines(files: Mapping[str, File]) -> list[dict[str, Any]]:
    """Return the records of all engines in a bundle's files."""
    return [record for file in files.values() for record in file.details.get("engines", [])]


def _profile(inputs: list[Mapping[str, Any]]) -> str:
    """Return the sizes of the token ids, such as `2/256/256`."""
    ids = next(tensor for tensor in inputs if tensor["name"] == "input_ids")
    sizes = [ids[shape][1] for shape in ("min_shape", "opt_shape", "max_shape")]
    return str(sizes[0]) if len(set(sizes)) == 1 else "/".join(map(str, sizes))
