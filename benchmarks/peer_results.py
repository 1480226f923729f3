"""What benchmarks/peers.py makes of the processes that it ran: one number for each thing measured, ratios, a table.

Nothing here runs a form, so that it can be tested without any peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

#: A difference from the float32 model at which a form with weights of 32 bits is called wrong, as a share of the spread
#: of its logits.
LIMIT = 1e-4
#: How often cycles are drawn to see how far a ratio may be off, which part of what comes out is shown, and the fewest
#: cycles that this says something of.
DRAWS, SPREAD, ENOUGH = 1000, (0.05, 0.95), 4


@dataclass(frozen=True)
class Column:
    """One thing measured.

    Attributes:
        title: Of the column.
        digits: After the point.
        more_is_better: Tokens a second, not milliseconds.
    """

    title: str
    digits: int
    more_is_better: bool = False

    def shown(self, value: float | None) -> str:
        """A cell."""
        return "-" if value is None else f"{value:,.{self.digits}f}"

    def ratio(self, own: float | None, best: float | None) -> float | None:
        """How many times as good ours is as the best peer; None where a number is missing or is not positive."""
        if own is None or best is None or own <= 0 or best <= 0:
            return None
        return own / best if self.more_is_better else best / own

    def best(self, values: Sequence[Any]) -> Any:
        """Of several numbers, or arrays of the same shape; None of none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return (numpy.max if self.more_is_better else numpy.min)(known, axis=0)


def columns(prompts: Sequence[int], ends: Sequence[int]) -> dict[str, Column]:
    """Of a table, by name."""
    found = {f"prompt {count}": Column(f"prefill {count}, tok/s", 0, True) for count in prompts}
    found |= {f"token {position}": Column(f"ms @{position}", 1) for position in ends}
    found["added"] = Column(f"what {ends[-1] - ends[0]:,} tokens add, ms", 1)
    return found | {"peak_mb": Column("peak MB", 0), "start_s": Column("start to first token, s", 1)}


def cycles_of(answer: dict[str, Any], prompts: Sequence[int], ends: Sequence[int], fastest: bool) -> dict[str, Any]:
    """What a form's processes answered: of each thing measured one number a cycle, an array; what is missing is left
    out.

    `answer` has seconds of prompts by length (`prompt`), those of each cycle's tokens by position (`token`), `start_s`,
    a list, and `peak_mb`.
    """
    chosen = numpy.min if fastest else numpy.median
    found = {f"prompt {count}": count / numpy.array(answer["prompt"].get(str(count), [])) for count in prompts}
    for position in ends:
        seconds = answer["token"].get(str(position), [])
        found[f"token {position}"] = 1e3 * numpy.array([chosen(turn) for turn in seconds])
    found["peak_mb"] = numpy.array([answer["peak_mb"]] if "peak_mb" in answer else [])
    found["start_s"] = numpy.array(answer["start_s"])
    return {name: values for name, values in found.items() if values.size}


def summary(cycles: dict[str, Any], ends: Sequence[int], fastest: bool) -> dict[str, Any]:
    """A form's numbers, of what `cycles_of` gives: the medians of cycles, or on a loaded machine the best.

    Of arrays [draws, cycles] they are arrays [draws].
    """
    found = {}
    for name, values in cycles.items():
        # Prompts are in tokens a second: the most are the best.
        best = numpy.max if name.startswith("prompt") else numpy.min
        found[name] = (best if fastest else numpy.median)(values, axis=-1)
    near, far = f"token {ends[0]}", f"token {ends[-1]}"
    if near in found and far in found:
        found["added"] = found[far] - found[near]
    return found


def drawn(cycles: dict[str, Any]) -> dict[str, Any]:
    """As many cycles as there are, drawn from them again and again: arrays [`DRAWS`, cycles].

    Of forms that took turns the same cycles are drawn, and of both positions of a form.
    """
    return {
        name: values[numpy.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))]
        for name, values in cycles.items()
    }


def comparison(
    own: dict[str, Any], peers: Sequence[dict[str, Any]], ends: Sequence[int], of: dict[str, Column], fastest: bool
) -> list[str]:
    """Cells: how many times as good one of ours is as the best of the others, and between which ratios nine of ten
    draws of its cycles lie.

    `own` and each of `peers` are what `cycles_of` gives.
    """
    whole = [summary(cycles, ends, fastest) for cycles in (own, *peers)]
    draws = [summary(drawn(cycles), ends, fastest) for cycles in (own, *peers)]
    cells = []
    for name, column in of.items():
        ratio = column.ratio(whole[0].get(name), column.best([numbers.get(name) for numbers in whole[1:]]))
        cell = "-" if ratio is None else f"{ratio:.2f}x"
        counted = own.get(name.replace("added", f"token {ends[-1]}"))
        if ratio is not None and counted is not None and len(counted) >= ENOUGH and not fastest:
            known = [numbers[name] for numbers in draws[1:] if name in numbers]
            all_of = zip(draws[0][name], column.best(known), strict=True)
            found = [value for value in (column.ratio(mine, best) for mine, best in all_of) if value is not None]
            low, high = numpy.quantile(found, SPREAD)
            cell += f" ({low:.2f} to {high:.2f})"
        cells.append(cell)
    return cells


def table(rows: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool = False) -> str:
    """Markdown: the forms with weights of the same bits together, and after them each of ours beside the best of the
    others.

    Each row has `title`, `bits`, `ours`, `distance` and `answer`, as `cycles_of` takes it.
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
                cells = comparison(cycles, peers, ends, of, fastest)
                title = row["title"].replace("*", "")
                lines.append(f"| {title}, times as good as the best peer | {' | '.join(cells)} | |")
    return "\n".join(lines)


def distance(found: Any, reference: Any) -> float:
    """How far logits [tokens, vocabulary] are from others: the root of the mean square, as a share of their spread.

    Raises:
        ValueError: If the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"logits of shape {found.shape}, but the reference has {reference.shape}")
    return float(((found - reference) ** 2).mean() ** 0.5 / reference.std())
