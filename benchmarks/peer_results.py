"""Compute the figures, ratios and tables of benchmarks/peers.py from its results.

Nothing here runs a form, so it can be tested without any peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

#: Largest accepted error of a form with 32-bit weights: the RMS difference from the float32 model's logits, divided by
#: their standard deviation.
LIMIT = 1e-4
#: Bootstrap draws, the quantiles shown of them, and the fewest cycles for which they are shown.
DRAWS, SPREAD, ENOUGH = 1000, (0.05, 0.95), 4


@dataclass(frozen=True)
class Column:
    """A measured quantity.

    Attributes:
        title: Title of the column.
        digits: Decimal digits.
        more_is_better: True for tokens per second, False for milliseconds.
    """

    title: str
    digits: int
    more_is_better: bool = False

    def shown(self, value: float | None) -> str:
        """Format a value for a cell."""
        return "-" if value is None else f"{value:,.{self.digits}f}"

    def ratio(self, own: Any, other: Any) -> Any:
        """Return how many times as good ours is, for numbers or arrays; NaN for missing or non-positive values."""
        own, other = (numpy.where(value > 0, value, numpy.nan) for value in (numpy.asarray(own), numpy.asarray(other)))
        return own / other if self.more_is_better else other / own


def columns(prompts: Sequence[int], ends: Sequence[int]) -> dict[str, Column]:
    """Return the columns of a table, by name."""
    found = {f"prompt {count}": Column(f"prefill {count}, tok/s", 0, True) for count in prompts}
    found |= {f"token {position}": Column(f"ms @{position}", 1) for position in ends}
    found["added"] = Column(f"what {ends[-1] - ends[0]:,} tokens add, ms", 1)
    return found | {"peak_mb": Column("peak MB", 0), "start_s": Column("start to first token, s", 1)}


def cycles_of(answer: dict[str, Any], prompts: Sequence[int], ends: Sequence[int], fastest: bool) -> dict[str, Any]:
    """Return one value per cycle for each measured quantity of a form, as arrays; missing quantities are left out.

    `answer` has seconds of prompts by length (`prompt`), seconds of each cycle's tokens by position (`token`), and the
    lists `start_s` and `peak_mb`.
    """
    chosen = numpy.min if fastest else numpy.median
    found = {f"prompt {count}": count / numpy.array(answer["prompt"].get(str(count), [])) for count in prompts}
    for position in ends:
        seconds = answer["token"].get(str(position), [])
        found[f"token {position}"] = 1e3 * numpy.array([chosen(turn) for turn in seconds])
    # Both measurements followed each other.
    found["added"] = found[f"token {ends[-1]}"] - found[f"token {ends[0]}"]
    found |= {name: numpy.array(answer[name]) for name in ("peak_mb", "start_s")}
    return {name: values for name, values in found.items() if values.size}


def summary(cycles: dict[str, Any], ends: Sequence[int], fastest: bool) -> dict[str, float]:
    """Return a form's figures from `cycles_of`: medians of cycles, or on a loaded machine the best."""
    if not fastest:
        return {name: float(numpy.median(values)) for name, values in cycles.items()}
    # For tokens per second the largest is the best. The least difference may be small because the first turn was slow.
    found = {name: float((max if name.startswith("prompt") else min)(values)) for name, values in cycles.items()}
    if "added" in found:
        found["added"] = found[f"token {ends[-1]}"] - found[f"token {ends[0]}"]
    return found


def comparison(
    own: dict[str, Any], peers: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool
) -> list[str]:
    """Return cells with the ratio of one of our forms to the best peer, and the range of nine of ten bootstrap draws.

    `own` and each of `peers` are results of `cycles_of`. A ratio is the median of the ratios of each cycle, in which
    both met the same speed of the machine; medians of two forms may be of different minutes. The ratio for added tokens
    is the ratio of the medians, because that of a cycle is mostly noise. The best peer has the least ratio.
    """
    cells = []
    for name, column in columns(prompts, ends).items():
        others = [peer[name] for peer in peers if name in peer]
        if name not in own or not others:
            cells.append("-")
            continue
        count = min(len(values) for values in (own[name], *others))
        draws = numpy.random.default_rng(0).integers(count, size=(DRAWS, count))
        if fastest:
            numbers = [summary(cycles, ends, fastest) for cycles in (own, *peers)]
            known = [column.ratio(numbers[0][name], other[name]) for other in numbers[1:] if name in other]
        else:
            # The first row has the measured cycles, the others are draws.
            chosen = numpy.vstack([numpy.arange(count), draws])
            known = [_ratio(column, own[name][chosen], other[chosen], name == "added") for other in others]
        ratios = numpy.atleast_1d(numpy.min(known, axis=0))
        cell = "-" if numpy.isnan(ratios[0]) else f"{ratios[0]:.2f}x"
        if cell != "-" and not fastest and count >= ENOUGH:
            low, high = numpy.nanquantile(ratios[1:], SPREAD)
            cell += f" ({low:.2f} to {high:.2f})"
        cells.append(cell)
    return cells


def _ratio(column: Column, own: Any, other: Any, of_medians: bool) -> Any:
    """Return the ratios of values [draws, cycles], [draws]."""
    if of_medians:
        return column.ratio(numpy.median(own, axis=-1), numpy.median(other, axis=-1))
    return numpy.median(column.ratio(own, other), axis=-1)


def table(rows: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool = False) -> str:
    """Return a Markdown table: forms grouped by weight precision, then each of ours compared with the best peer.

    Each row has `title`, `bits`, `ours`, `distance` and `answer`, in the format that `cycles_of` takes.
    """
    of = columns(prompts, ends)
    lines = [
        f"| | {' | '.join(column.title for column in of.values())} | distance |",
        "|---" * (len(of) + 2) + "|",
    ]
    for bits in sorted({row["bits"] for row in rows}, reverse=True):
        group = [(row, cycles_of(row["answer"], prompts, ends, fastest)) for row in rows if row["bits"] == bits]
        peers = [cycles for row, cycles in group if not row["ours"]]
        for row, cycles in group:
            numbers = summary(cycles, ends, fastest)
            cells = [column.shown(numbers.get(name)) for name, column in of.items()]
            lines.append(f"| {row['title']} | {' | '.join(cells)} | {row['distance']:.1e} |")
        for row, cycles in group:
            if row["ours"] and peers:
                cells = comparison(cycles, peers, prompts, ends, fastest)
                title = row["title"].replace("*", "")
                lines.append(f"| {title}, times as good as the best peer | {' | '.join(cells)} | |")
    return "\n".join(lines)


def distance(found: Any, reference: Any) -> float:
    """Return the RMS difference of logits [tokens, vocabulary], divided by the reference's standard deviation.

    Raises:
        ValueError: If the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"logits of shape {found.shape}, but the reference has {reference.shape}")
    return float(((found - reference) ** 2).mean() ** 0.5 / reference.std())
