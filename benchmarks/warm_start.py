"""How long a compiled session takes to be ready: the first time, and in later processes, from graphs kept on disk.

    python benchmarks/warm_start.py                     # the 110M Llama of benchmarks/loop.py, cache of 4096

Ready means that `Session.warm_up` has returned: every method of every length bucket has run, choosing tokens included.
Each start is a process of its own; the model's construction is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import typer


def start(name: str, length: int, buckets: bool, folder: str | None) -> float:
    """Seconds from having a model to being ready, in this process."""
    from loop import random_model

    from exportable_cache import ExportableCache, Session

    model = random_model(name, length)
    begin = time.perf_counter()
    session = Session.from_model(
        model, ExportableCache.from_model(model, length), compile="wait", buckets=buckets, graph_cache=folder
    )
    session.warm_up()
    return time.perf_counter() - begin


def main(
    model: Annotated[str, typer.Option(help="Of benchmarks/loop.py.")] = "llama-110m",
    length: Annotated[int, typer.Option(help="Slots allocated.")] = 4096,
    buckets: Annotated[bool, typer.Option(help="With length buckets.")] = True,
    warm: Annotated[int, typer.Option(help="Later processes.")] = 2,
    torch_only: Annotated[bool, typer.Option("--torch-only", help="With torch's own cache only.")] = False,
    graph_cache: Annotated[str | None, typer.Option(hidden=True)] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Print the seconds of each start."""
    if child:
        print(start(model, length, buckets, graph_cache))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        again = ["--model", model, "--length", str(length), "--buckets" if buckets else "--no-buckets", "--child"]
        again += [] if torch_only else ["--graph-cache", f"{folder}/graphs"]
        for run in range(1 + warm):
            done = subprocess.run([sys.executable, __file__, *again], env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            print(f"{'first' if run == 0 else 'later'} process: {float(done.stdout.split()[-1]):.1f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
