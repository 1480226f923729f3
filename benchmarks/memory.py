"""Show the resident memory of a process that runs a bundle, by stage: anonymous memory, and pages of files.

    python benchmarks/memory.py artifacts/x
    python benchmarks/memory.py artifacts/x --program build/exportable_cache_generate    # in C++

Anonymous memory stays until the process releases it. The system may drop pages of a file, unless they are locked, as
ExecuTorch's Python runtime locks them. Linux only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

_FIELDS = {"now": "VmRSS", "most": "VmHWM", "own": "RssAnon", "of files": "RssFile", "locked": "VmLck"}
_SHOWN = 5
_TOKEN = 5


def resident(process: int | str = "self") -> dict[str, int]:
    """Return the MB of this process by kind."""
    status = Path(f"/proc/{process}/status").read_text()
    found = {name: re.search(rf"{field}:\s+(\d+)", status) for name, field in _FIELDS.items()}
    return {name: int(match[1]) // 1024 for name, match in found.items() if match}


def by_file() -> dict[str, int]:
    """Return the MB of this process by mapped file, the largest ones."""
    sizes: Counter[str] = Counter()
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapped := re.match(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$", line):
            name = Path(mapped[1]).name or "own"
        elif line.startswith("Rss:"):
            sizes[name] += int(line.split()[1])
    return {name: size // 1024 for name, size in sizes.most_common(_SHOWN)}


def show(stage: str, found: dict[str, int]) -> None:
    """Print one line."""
    print(f"{stage:28}", *(f"{name} {size:5}" for name, size in found.items()), flush=True)


def in_python(bundle: Path) -> None:
    """Show the stages of a session, until the cache is full."""
    show("Python", resident())
    import torch

    show("import torch", resident())
    from exportable_cache import load

    show("import exportable_cache", resident())
    from exportable_cache.common.compat.executorch import runtime

    runtime()
    show("ExecuTorch's runtime", resident())
    session = load(bundle)
    show("load", resident())
    chunk = min(256, session.max_length or 256)
    ids = torch.full((session.batch_size, chunk), _TOKEN)
    session.prefill(ids)
    show(f"prompt of {chunk}", resident())
    while session.room is None or session.room > chunk + 1:
        session.prefill(ids)
        if session.room is None:
            break
    session.decode(torch.full((session.batch_size,), _TOKEN))
    show("cache full", resident())
    print("by what is mapped:", by_file())


def in_cpp(program: Path, bundle: Path, tokens: int) -> None:
    """Show the memory of the C++ runner's program while it runs."""
    given = " ".join([str(_TOKEN)] * tokens)
    run = subprocess.Popen(
        [program, bundle, "--tokens", given, "--max-new-tokens", "32"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    greatest: dict[str, int] = {}
    while run.poll() is None:
        try:
            found = resident(run.pid)
        except FileNotFoundError:
            break
        if found.get("now", 0) > greatest.get("now", 0):
            greatest = found
        time.sleep(0.005)
    if run.wait():
        sys.exit(f"{program} failed with {run.returncode}")
    show(f"C++, {tokens} tokens, at most", greatest)


def main(
    bundle: Annotated[Path, typer.Argument(help="An ExecuTorch bundle.")],
    program: Annotated[Path | None, typer.Option(help="exportable_cache_generate, to look at C++.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt in C++.")] = 300,
) -> None:
    """Show where memory goes."""
    if program is not None:
        in_cpp(program, bundle, tokens)
    else:
        in_python(bundle)


if __name__ == "__main__":
    typer.run(main)
