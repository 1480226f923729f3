"""Runner of a tensor-parallel program for verification, with one process per rank.

Importing this module imports no torch, because a process of a rank first takes stdout away from torch's libraries.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import VerificationError

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from ..bundle.bundle import Bundle
    from ..program.methods import ProgramMethod

#: Limit of a step of a large model, or of opening its program, on a slow machine.
_MOST_SECONDS = 600
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from exportable_cache.verification.rank_runner import serve; serve()"


class RankProcesses:
    """A runner of a tensor-parallel program, with a process per rank on this machine; it returns rank 0's results.

    Args:
        bundle: A bundle with several ranks; its manifest need not be written yet.

    Raises:
        BundleError: If it is machine code that is not trusted.
        VerificationError: If a process cannot open its part.
    """

    def __init__(self, bundle: Bundle) -> None:
        import torch

        bundle.check_trusted()
        manifest = bundle.manifest
        assert manifest.ranks is not None
        self.methods: Mapping[str, ProgramMethod] = manifest.description().methods
        self._folder = tempfile.TemporaryDirectory(prefix="exportable_cache-ranks-")
        size = manifest.ranks.size
        start: dict[str, Any] = {
            "size": size,
            "threads": max(torch.get_num_threads() // size, 1),
            "store": os.path.join(self._folder.name, "store"),
            "path": str(bundle.path),
            "manifest": manifest.model_dump(mode="json", exclude={"checksum"}),
        }
        command = [sys.executable, "-c", _CHILD, *sys.path]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(size)
        ]
        try:
            for rank, process in enumerate(self._processes):
                _send(process, {**start, "rank": rank})
            self._replies()
        except BaseException:
            self.close()
            raise

    def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a method on all ranks, see `Runner.run`.

        Raises:
            VerificationError: If one of them fails, with its error.
        """
        for process in self._processes:
            _send(process, (method, inputs))
        return self._replies()

    def _replies(self) -> Any:
        found = []
        for rank, process in enumerate(self._processes):
            try:
                if not select.select([process.stdout], [], [], _MOST_SECONDS)[0]:  # type: ignore[type-var]
                    raise VerificationError(
                        f"rank {rank} of {len(self._processes)} has not answered for {_MOST_SECONDS} s; export without "
                        "verification (--no-verify), and verify afterwards"
                    )
                kind, value = pickle.load(process.stdout)  # type: ignore[arg-type]
            except (EOFError, pickle.UnpicklingError):
                kind, value = "failed", f"its process ended with {process.wait()}"
            if kind == "failed":
                raise VerificationError(f"rank {rank} of {len(self._processes)} failed: {value}")
            found.append(value)
        return found[0]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                try:
                    stream.close()  # type: ignore[union-attr]
                except OSError:  # unsent data is lost, because the process has ended
                    pass
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(value, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # its reply has the reason


def serve() -> None:
    """Run the program of one rank for the process at the other end of the standard streams, until it closes them."""
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
