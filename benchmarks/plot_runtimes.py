"""Draw tokens a second of the runtimes in a results file as an SVG, at 100 and at 4,000 tokens in the cache.

    python benchmarks/plot_runtimes.py benchmarks/results/2026-11-25-runtimes.json docs/images/runtimes.svg

The results file holds the medians that `benchmarks/peers.py` prints for two threads with AVX-512. Bars are scaled
within each precision, because 4-bit weights are several times as fast as float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

ROW, HEADING, NAMES, BAR, VALUE = 20, 30, 270, 220, 50
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 } .heading { font-weight: 600 } .ours { font-weight: 600 }
rect { fill: #9aa5b1 } rect.ours { fill: #2f6fde }
@media (prefers-color-scheme: dark) { text { fill: #ddd } rect { fill: #66707c } rect.ours { fill: #5b93f5 } }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a text element whose baseline starts at (x, y)."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escaped}</text>'


def bars(row: dict[str, Any], y: float, longest: dict[str, float]) -> list[str]:
    """Return a runtime's name and, for each cache length, its bar and its tokens a second."""
    kind = "ours" if row["ours"] else ""
    parts = [text(0, y + 14, row["name"], kind)]
    for column, (length, most) in enumerate(longest.items()):
        speed = 1000 / row["ms_per_token"][length]
        x, width = NAMES + column * (BAR + VALUE), BAR * speed / most
        parts.append(f'<rect x="{x}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" class="{kind}"/>')
        parts.append(text(x + width + 5, y + 14, f"{speed:.0f}", kind))
    return parts


def draw(results: dict[str, Any]) -> str:
    """Return the SVG of a results file's rows, grouped by precision."""
    lengths = list(results["rows"][0]["ms_per_token"])
    parts = [text(NAMES + i * (BAR + VALUE), 14, f"tokens/s, {int(n):,} tokens cached") for i, n in enumerate(lengths)]
    y = 22
    for precision in dict.fromkeys(row["precision"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["precision"] == precision]
        longest = {n: max(1000 / row["ms_per_token"][n] for row in rows) for n in lengths}
        parts.append(text(0, y + 20, precision, "heading"))
        y += HEADING
        for row in rows:
            parts += bars(row, y, longest)
            y += ROW
    width = NAMES + len(lengths) * (BAR + VALUE)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 6}" width="{width}" role="img">'
    return "\n".join([head, f"<title>{results['title']}</title>", f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def main(
    results: Annotated[Path, typer.Argument(help="Results file, JSON.")],
    plot: Annotated[Path, typer.Argument(help="SVG file to write.")],
) -> None:
    """Draw `results` into `plot`."""
    plot.write_text(draw(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
