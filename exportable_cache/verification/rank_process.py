"""Process of one rank of a tensor-parallel program under verification."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve the process at the other end of the standard streams, until it closes them."""
    replies = os.fdopen(os.dup(1), "wb")
    # Output of torch's libraries must not mix with the replies.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    start = pickle.load(sys.stdin.buffer)
    rank = start["rank"]

    def reply(kind: str, value: Any = None) -> None:
        pickle.dump((kind, value), replies)
        replies.flush()

    try:
        runner = _opened(**start)
        reply("ready")
        while True:
            try:
                method, inputs = pickle.load(sys.stdin.buffer)
            except EOFError:
                break
            result = runner.run(method, *inputs)
            reply("done", result if rank == 0 else None)
    except Exception as error:
        reply("failed", f"{type(error).__name__}: {error}")
    replies.close()
    # Without waiting for the threads of a group whose other processes may be gone.
    os._exit(0)


def _opened(rank: int, size: int, threads: int, store: str, path: str, manifest: dict[str, Any]) -> Any:
    import torch
    from torch import distributed

    from ..bundle.bundle import Bundle
    from ..bundle.manifest import Manifest

    torch.set_num_threads(threads)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    # Who starts this has trusted the bundle, or made it.
    runner, _ = Bundle(Path(path), Manifest.model_validate(manifest), trusted=True).open_runner()
    return runner
