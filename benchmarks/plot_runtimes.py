"""Draw tokens a second of the runtimes in a results file of benchmarks/peers.py, near the start and end of the cache.

    python benchmarks/plot_runtimes.py benchmarks/results/2026-11-27-peers-qwen3-0.6b.json docs/images/runtimes.svg

Bars are scaled within each precision, because 4-bit weights are several times as fast as 16-bit ones. The figures are
those of the largest number of threads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from peer_forms import FORMS
from peer_results import cycles_of, summary

ROW, HEADING, NAMES, BAR, VALUE = 20, 30, 350, 200, 50
PRECISIONS = {32: "float32", 16: "16-bit checkpoint", 4: "4-bit weights"}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 } .heading { font-weight: 600 } .ours { font-weight: 600 }
rect { fill: #9aa5b1 } rect.ours { fill: #2f6fde }
@media (prefers-color-scheme: dark) { text { fill: #ddd } rect { fill: #66707c } rect.ours { fill: #5b93f5 } }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a text element whose baseline starts at (x, y)."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escaped}</text>'


def bars(name: str, is_ours: bool, speeds: dict[int, float], y: float, longest: dict[int, float]) -> list[str]:
    """Return a runtime's name and, for each position, its bar and its tokens a second."""
    kind = "ours" if is_ours else ""
    parts = [text(0, y + 14, name, kind)]
    for column, (position, most) in enumerate(longest.items()):
        x, width = NAMES + column * (BAR + VALUE), BAR * speeds[position] / most
        parts.append(f'<rect x="{x}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" class="{kind}"/>')
        parts.append(text(x + width + 5, y + 14, f"{speeds[position]:.0f}", kind))
    return parts


def draw(results: dict[str, Any]) -> str:
    """Return the SVG of a results file, grouped by precision."""
    ends, prompts = results["ends"], results["prompts"]
    threads = max(group["threads"] for group in results["groups"])
    words = (f"tokens/s, {end:,} tokens cached" for end in ends)
    parts = [text(NAMES + at * (BAR + VALUE), 14, one) for at, one in enumerate(words)]
    y = 22
    groups = [group for group in results["groups"] if group["threads"] == threads]
    for group in sorted(groups, key=lambda group: -group["bits"]):
        speeds = {}
        for name, form in FORMS.items():
            if name in group["answers"] and not form.is_bound:
                found = summary(
                    cycles_of(group["answers"][name], prompts, ends, results["fastest"]), results["fastest"]
                )
                speeds[name] = {end: 1000 / found[f"token {end}"] for end in ends}
        longest = {end: max(one[end] for one in speeds.values()) for end in ends}
        parts.append(text(0, y + 20, PRECISIONS[group["bits"]], "heading"))
        y += HEADING
        for name, found in speeds.items():
            title = FORMS[name].title.partition("(")[0].replace("*", "").replace("`", "").strip()
            title = title.replace("ours", "exportable_cache") if FORMS[name].is_ours else title
            parts += bars(title, FORMS[name].is_ours, found, y, longest)
            y += ROW
    width = NAMES + len(ends) * (BAR + VALUE)
    title = f"{results['model']}, {threads} threads, {results['processor']}, {results['cores']} cores"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 6}" width="{width}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def main(
    results: Annotated[Path, typer.Argument(help="Results file, JSON.")],
    plot: Annotated[Path, typer.Argument(help="SVG file to write.")],
) -> None:
    """Draw `results` into `plot`."""
    plot.write_text(draw(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
