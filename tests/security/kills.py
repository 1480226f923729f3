"""Exports that are killed: at random times, and at calls to the file system. `python -m tests.security.kills`, or
`make kills`.

An export of a tiny model, for a target that lowers nothing, runs in a copy of this process, over a bundle of its own or
where there is none, and is killed (SIGKILL). Then: is the folder whole, or not there if it was not before? Does the
next export leave only its bundle? POSIX only.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from exportable_cache import export
from exportable_cache.backends import TARGETS
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.common.fs import files
from exportable_cache.errors import ExportableCacheError

from ..support import fake_target
from ..support.models import tiny_model

KILLS, FINISHED, HALF, LOST, LEFT = "kills", "finished before", "half bundles", "bundles lost", "leftovers"
#: What Python tells an audit hook before it does it: calls that change a folder or a file, from whatever module.
_EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.link", "os.symlink")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Exports:
    """Exports to one place, each of which may be killed.

    Args:
        work: An empty folder.
        exchanges: Whether two folders are exchanged in one call, where the system can.
    """

    def __init__(self, work: Path, exchanges: bool = True) -> None:
        self.place = work / "bundle"
        self.exchanges = exchanges
        self._model = tiny_model("llama", num_hidden_layers=1)
        self.counts: Counter[str] = Counter()

    def start(self, before: Callable[[], None]) -> int:
        """The process of a new export, and what it does first."""
        child = os.fork()
        if child == 0:
            try:
                silent = os.open(os.devnull, os.O_RDWR)
                os.dup2(silent, 1)
                os.dup2(silent, 2)
                torch.set_num_threads(1)
                if not self.exchanges:
                    files.exchange = lambda one, other: False
                TARGETS["fake"] = fake_target.ENTRY
                before()
                export(self._model, "fake", 16, self.place, prefill_chunk=4, verify=False, overwrite=True)
                os._exit(0)
            finally:
                os._exit(1)
        return child

    def finish(self) -> None:
        """An export that nobody kills, after which only its bundle is to be there."""
        if os.waitpid(self.start(lambda: None), 0)[1] != 0:
            raise RuntimeError("an export failed that was not killed")
        if not self._is_whole(self.place):
            self.counts[HALF] += 1
        if [path.name for path in self.place.parent.iterdir()] != [self.place.name]:
            self.counts[LEFT] += 1
            for path in self.place.parent.iterdir():
                if path != self.place:
                    shutil.rmtree(path)

    def judge(self, child: int, was_there: bool) -> None:
        """After a process ended: what it left."""
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            self.counts[FINISHED] += 1
            return
        self.counts[KILLS] += 1
        if self.place.exists():
            if not self._is_whole(self.place):
                self.counts[HALF] += 1
        elif was_there:
            # Between two renames, where the system exchanges no folders: whole, and beside it.
            aside = None if self.exchanges else files.retired_folder(self.place)
            if aside is None or not self._is_whole(aside):
                self.counts[LOST] += 1

    def _is_whole(self, folder: Path) -> bool:
        with _fake_target():
            try:
                Bundle.open(folder, known=False)
            except ExportableCacheError:
                return False
        return True

    def at_a_time(self, seconds: float, over: bool) -> None:
        """Kill one after this long, then let the next finish."""
        if not over:
            shutil.rmtree(self.place, ignore_errors=True)
        child = self.start(lambda: None)
        watched = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        if watched is None:
            time.sleep(seconds)
        else:
            select.select([watched], [], [], seconds)
            os.close(watched)
        os.kill(child, signal.SIGKILL)
        self.judge(child, over)
        self.finish()

    def at_a_call(self, number: int, over: bool) -> bool:
        """Kill one at the file-system call of this number; whether there was one."""
        if not over:
            shutil.rmtree(self.place, ignore_errors=True)
        killed = self.counts[KILLS]
        self.judge(self.start(lambda: kill_at_call(number)), over)
        self.finish()
        return self.counts[KILLS] > killed

    def seconds(self) -> float:
        """How long one takes."""
        start = time.monotonic()
        self.finish()
        return time.monotonic() - start


@contextmanager
def _fake_target() -> Any:
    before = TARGETS.get("fake")
    TARGETS["fake"] = fake_target.ENTRY
    try:
        yield
    finally:
        if before is None:
            del TARGETS["fake"]
        else:
            TARGETS["fake"] = before


def kill_at_call(number: int) -> None:
    """Kill this process just before the call of this number that changes files, folders or what is on the disk."""
    left = [number]

    def called() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        if event in _EVENTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES):
            called()

    def counted(real: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            called()
            return real(*arguments, **options)

        return call

    # Of these Python tells no hook.
    os.fsync = counted(os.fsync)
    os.close = counted(os.close)
    files.exchange = counted(files.exchange)
    sys.addaudithook(hook)


def kills(times: int, rounds: int, seed: int, keep: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Kill `times` exports at random times, and `rounds` at each call, over a bundle and where there is none.

    Args:
        rounds: Kills at each call, with and without an exchange of folders.
        keep: Told how far it is.
    """
    found: Counter[str] = Counter()
    choose = random.Random(seed)
    for exchanges in (True, False):
        with tempfile.TemporaryDirectory() as temporary:
            exports = Exports(Path(temporary), exchanges)
            exports.finish()
            longest = exports.seconds()
            tries = 0
            while exports.counts[KILLS] < times // 2 and tries < 3 * times:
                # Most of an export computes; the end of it writes.
                low = 0.0 if tries % 2 else 0.6
                finished = exports.counts[FINISHED]
                exports.at_a_time(choose.uniform(low, 1.0) * longest, over=bool(tries % 4))
                if exports.counts[FINISHED] > finished:
                    # It was measured while the machine did more than it does now.
                    longest *= 0.8
                tries += 1
            keep(f"exchanges {exchanges}: {dict(exports.counts)} at random times of {longest:.2f} s")
            for over in (False, True):
                calls = 0
                while rounds and all(exports.at_a_call(calls + 1, over) for _ in range(rounds)):
                    calls += 1
                keep(f"exchanges {exchanges}, over a bundle {over}: {dict(exports.counts)} at {calls} calls")
                found["calls"] += calls
            found += exports.counts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=200, help="kills at random times")
    parser.add_argument("--rounds", type=int, default=1, help="kills at each call to the file system")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = kills(arguments.times, arguments.rounds, arguments.seed, lambda line: print(line, flush=True))
    print(", ".join(f"{found[name]} {name}" for name in (KILLS, FINISHED, HALF, LOST, LEFT, "calls")))
    sys.exit(1 if found[HALF] + found[LOST] + found[LEFT] else 0)


if __name__ == "__main__":
    main()
