"""Which layers of every architecture are fused on ExecuTorch: by its own operators, and by this package's.

`python -m tests.zoo.fused` prints a line for each, in a process of its own; nothing is exported.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

from exportable_cache import ExportableCache
from exportable_cache.backends.executorch.attention.fused import fusable_layers, native_layouts
from exportable_cache.errors import ExportableCacheError

from .architectures import architectures
from .build import tiny_model
from .check import MAX_CACHE_LEN

SECONDS = 120


def counts(name: str) -> tuple[int, int, int]:
    """Layers that keep keys and values of an architecture without an encoder, and how many of them are fused by
    ExecuTorch's operators, and by ours.
    """
    (architecture,) = (row for row in architectures() if row.name == name)
    model = tiny_model(architecture)
    cache = ExportableCache.from_model(model, MAX_CACHE_LEN, attn_implementation=None)
    keeping = [layer.storage is not None for layer in cache.layers]
    theirs, ours = fusable_layers(model, cache), [layout is not None for layout in native_layouts(model, cache)]
    return sum(keeping), sum(theirs), sum(ours)


def main() -> None:
    if len(sys.argv) > 1:
        warnings.simplefilter("ignore")
        try:
            print("counts", *counts(sys.argv[1]))
        except ExportableCacheError as error:
            print("refused", error)
        return
    for row in architectures():
        if row.group in ("seq2seq", "speech"):
            continue
        command = [sys.executable, "-m", "tests.zoo.fused", row.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
        print(f"{row.name}\t{said}", flush=True)


if __name__ == "__main__":
    main()
