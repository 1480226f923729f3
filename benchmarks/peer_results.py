"""What benchmarks/peers.py makes of the processes that it ran: one number for each thing measured, ratios, a table.

Nothing here runs a form, so that it can be tested without any peer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: A difference from the float32 model at which a form with weights of 32 bits is called wrong, as a share of the spread
#: of its logits.
LIMIT = 1e-4


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

    def best(self, values: Sequence[float | None]) -> float | None:
        """Of several."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return max(known) if self.more_is_better else min(known)


def columns(prompts: Sequence[int], ends: Sequence[int]) -> dict[str, Column]:
    """Of a table, by name."""
    found = {f"prompt {count}": Column(f"prefill {count}, tok/s", 0, True) for count in prompts}
    found |= {f"token {position}": Column(f"ms @{position}", 1) for position in ends}
    found["added"] = Column(f"what {ends[-1] - ends[0]:,} tokens add, ms", 1)
    return found | {"peak_mb": Column("peak MB", 0), "start_s": Column("start to first token, s", 1)}


def summary(
    rounds: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int], fastest: bool
) -> dict[str, float]:
    """A form's numbers, of what its processes answered: the medians, or on a loaded machine the fastest.

    Each of `rounds` has seconds of prompts by length (`prompt`), of tokens by position (`token`), `peak_mb`, `start_s`.
    """
    chosen: Callable[[list[float]], float] = min if fastest else statistics.median
    found = {}
    for count in prompts:
        found[f"prompt {count}"] = count / chosen([answer["prompt"][str(count)] for answer in rounds])
    for position in ends:
        seconds = [value for answer in rounds for value in answer["token"][str(position)]]
        found[f"token {position}"] = 1e3 * chosen(seconds)
    found["added"] = found[f"token {ends[-1]}"] - found[f"token {ends[0]}"]
    # The most memory is the most of all.
    return found | {
        "peak_mb": max(answer["peak_mb"] for answer in rounds),
        "start_s": chosen([answer["start_s"] for answer in rounds]),
    }


def table(rows: Sequence[dict[str, Any]], prompts: Sequence[int], ends: Sequence[int]) -> str:
    """Markdown: the forms with weights of the same bits together, and after them each of ours beside the best of the
    others.

    Each row has `title`, `bits`, `ours`, `distance` and `numbers`, as `summary` gives them.
    """
    of = columns(prompts, ends)
    lines = [
        f"| | {' | '.join(column.title for column in of.values())} | distance |",
        "|---" * (len(of) + 2) + "|",
    ]
    for bits in sorted({row["bits"] for row in rows}, reverse=True):
        group = [row for row in rows if row["bits"] == bits]
        peers = [row["numbers"] for row in group if not row["ours"]]
        for row in group:
            cells = [column.shown(row["numbers"].get(name)) for name, column in of.items()]
            lines.append(f"| {row['title']} | {' | '.join(cells)} | {row['distance']:.1e} |")
        for row in group:
            if row["ours"] and peers:
                cells = []
                for name, column in of.items():
                    best = column.best([numbers.get(name) for numbers in peers])
                    ratio = column.ratio(row["numbers"].get(name), best)
                    cells.append("-" if ratio is None else f"{ratio:.2f}x")
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
