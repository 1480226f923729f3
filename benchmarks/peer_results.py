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
#: A form also meets the goal of tokens at the first position if reading its weights alone takes this share of its time.
READING = 0.95


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
    found |= {name: numpy.array(answer[name]) for name in ("peak_mb", "start_s")}
    return {name: values for name, values in found.items() if values.size}


def summary(cycles: dict[str, Any], fastest: bool) -> dict[str, float]:
    """Return a form's figures from `cycles_of`: medians of cycles, or on a loaded machine the best."""
    if not fastest:
        return {name: float(numpy.median(values)) for name, values in cycles.items()}
    # For tokens per second the largest is the best.
    return {name: float((max if name.startswith("prompt") else min)(values)) for name, values in cycles.items()}


def ratios(
    own: dict[str, Any], peers: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool
) -> dict[str, Any]:
    """Return how many times as good one of our forms is as the best peer, by column: the ratio, and then draws of it.

    `own` and each of `peers` are results of `cycles_of`. A ratio is the median of the ratios of each cycle, in which
    both met the same speed of the machine; medians of two forms may be of different minutes. The best peer has the
    least ratio. Columns without values are left out.
    """
    found = {}
    for name, column in columns(prompts, ends).items():
        others = [peer[name] for peer in peers if name in peer]
        if name not in own or not others:
            continue
        if fastest:
            numbers = [summary(cycles, fastest) for cycles in (own, *peers)]
            known = [column.ratio(numbers[0][name], other[name]) for other in numbers[1:] if name in other]
        else:
            count = min(len(values) for values in (own[name], *others))
            draws = numpy.random.default_rng(0).integers(count, size=(DRAWS if count >= ENOUGH else 0, count))
            # The first row has the measured cycles, the others are draws.
            chosen = numpy.vstack([numpy.arange(count), draws])
            known = [numpy.median(column.ratio(own[name][chosen], other[chosen]), axis=-1) for other in others]
        found[name] = numpy.atleast_1d(numpy.min(known, axis=0))
    return found


def comparison(found: dict[str, Any], prompts: Sequence[int], ends: Sequence[int]) -> list[str]:
    """Return cells with the ratios, and the range of nine of ten draws."""
    cells = []
    for name in columns(prompts, ends):
        values = found.get(name)
        if values is None or numpy.isnan(values[0]):
            cells.append("-")
            continue
        cell = f"{values[0]:.2f}x"
        if len(values) > 1:
            low, high = numpy.nanquantile(values[1:], SPREAD)
            cell += f" ({low:.2f} to {high:.2f})"
        cells.append(cell)
    return cells


def goal_cells(
    goals: dict[str, float],
    found: dict[str, Any],
    share: float | None,
    prompts: Sequence[int],
    ends: Sequence[int],
) -> list[str]:
    """Return cells that say which goals are met.

    Args:
        goals: Least ratio to the best peer by kind of column, as in `Form.goals`.
        found: The result of `ratios`.
        share: The share of a token's time at the first position that reading the weights alone takes, if measured.
        prompts: Prompt lengths.
        ends: Positions of tokens.
    """
    kinds = {f"prompt {count}": "prompt" for count in prompts} | {"peak_mb": "peak_mb"}
    kinds |= {f"token {ends[0]}": "first", f"token {ends[-1]}": "last"}
    cells = []
    for name in columns(prompts, ends):
        goal, values = goals.get(kinds.get(name, "")), found.get(name)
        if goal is None or values is None:
            cells.append("-")
            continue
        is_met = values[0] >= goal
        cell = f"{goal:.2f}x"
        if kinds[name] == "first" and share is not None:
            cell += f", or {READING:.0%} of the time to read ({share:.0%})"
            is_met = is_met or share >= READING
        cells.append(f"{cell}: {'met' if is_met else '**not met**'}")
    return cells


def table(rows: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool = False) -> str:
    """Return a Markdown table: forms grouped by weight precision, then each of ours compared with the best peer.

    Each row has `title`, `bits`, `ours`, `bound`, `goals`, `distance` and `answer`, in the format that `cycles_of`
    takes. A bound has tokens only, and is not compared with ours as a peer is.
    """
    of = columns(prompts, ends)
    first = f"token {ends[0]}"
    lines = [
        f"| | {' | '.join(column.title for column in of.values())} | distance |",
        "|---" * (len(of) + 2) + "|",
    ]
    for bits in sorted({row["bits"] for row in rows}, reverse=True):
        group = [(row, cycles_of(row["answer"], prompts, ends, fastest)) for row in rows if row["bits"] == bits]
        bounds = [{first: cycles[first]} for row, cycles in group if row["bound"] and first in cycles]
        peers = [cycles for row, cycles in group if not row["ours"] and not row["bound"]]
        for row, cycles in group:
            numbers = summary(bounds[0] if row["bound"] and bounds else cycles, fastest)
            cells = [column.shown(numbers.get(name)) for name, column in of.items()]
            shown = "" if row["bound"] else f" {row['distance']:.1e}"
            lines.append(f"| {row['title']} | {' | '.join(cells)} |{shown} |")
        for row, cycles in group:
            if row["ours"] and peers:
                title = row["title"].replace("*", "")
                found = ratios(cycles, peers, prompts, ends, fastest)
                cells = comparison(found, prompts, ends)
                lines.append(f"| {title}, times as good as the best peer | {' | '.join(cells)} | |")
                if row["goals"]:
                    reading = ratios(cycles, bounds, prompts, ends, fastest).get(first) if bounds else None
                    share = None if reading is None else float(reading[0])
                    cells = goal_cells(row["goals"], found, share, prompts, ends)
                    lines.append(f"| {title}, goals | {' | '.join(cells)} | |")
    return "\n".join(lines)


def distance(found: Any, reference: Any) -> float:
    """Return the RMS difference of logits [tokens, vocabulary], divided by the reference's standard deviation.

    Raises:
        ValueError: If the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"logits of shape {found.shape}, but the reference has {reference.shape}")
    return float(((found - reference) ** 2).mean() ** 0.5 / reference.std())
