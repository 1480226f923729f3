"""Mutated bundles, saved states and saved caches: what opening and running each does. `make fuzz`, or
`python -m tests.security.fuzz --help`.

Mutations are tried in copies of this process (POSIX only), so that a crash is counted and not suffered. Sealed ones
have every checksum made right again, as anybody can.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

from exportable_cache.bundle.files import record_path
from exportable_cache.errors import ExportableCacheError

from .attacks import Attack, attacks

#: What may come of a mutation.
REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE = "refused", "same output", "other output", "raw error", "crash", "code run"
SLOW = "over 20 s"
#: Seconds of processor time that a mutation may take, and after which it is given up.
_LONGEST, _SECONDS = 20, 60
#: Mutations that one process tries, so that none meets what many before it have left.
_A_WORKER = 100
#: Events of Python's that nothing which is opened may cause.
_WATCHED = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.mkdir",
    "os.remove",
    "socket.connect",
    "pickle.find_class",
)


class Worker:
    """A copy of this process that tries one mutation after another, until one kills it. POSIX only.

    It opens the whole thing first: libraries are imported once and not for each mutation, and what the unharmed one
    gives is known. (Libraries that start threads do not survive a fork, so this process opens nothing itself.)

    Args:
        attack: What is tried.

    Raises:
        RuntimeError: If what is attacked does not work itself.
    """

    def __init__(self, attack: Attack) -> None:
        ours, its = socket.socketpair()
        self._child = os.fork()
        if self._child == 0:
            ours.close()
            try:
                _serve(attack, its.makefile("rw"))
            finally:
                os._exit(1)
        its.close()
        self._stream = ours.makefile("rw")
        ours.close()
        self.is_alive = True
        if self._stream.readline().strip() != "ready":
            raise RuntimeError(f"{attack.name}: what is attacked does not work itself")

    def outcome(self, folder: Path) -> tuple[str, str]:
        """What opening a folder does, and what it said."""
        self._stream.write(f"{folder}\n")
        self._stream.flush()
        told = self._stream.readline()
        if told:
            return tuple(json.loads(told))
        self.is_alive = False
        status = os.waitpid(self._child, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return SLOW, f"given up after {_SECONDS} s"
        return CRASH, f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """End it."""
        self._stream.close()
        if self.is_alive:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)


def _serve(attack: Attack, stream: TextIO) -> None:
    faulthandler.disable()
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    expected = json.loads(json.dumps(attack.use(attack.source)))
    # A claim of more memory than there is becomes an error, as it would on a small machine.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), used + (4 << 30)))
    ran: list[str] = []
    ours = str(record_path().parent)

    def hook(event: str, arguments: tuple) -> None:
        # The record of digests is this package's own: a file that is some seconds old is noted there. And a folder that
        # is there is not made: torch asks for Inductor's whenever it looks for it.
        is_there = event == "os.mkdir" and os.path.isdir(arguments[0])
        if event in _WATCHED and not is_there and not str(arguments[0]).startswith(ours):
            ran.append(event)

    sys.addaudithook(hook)
    stream.write("ready\n")
    stream.flush()
    for line in stream:
        ran.clear()
        told = ""
        # Of processor time: on a busy machine a minute of the clock says nothing.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        begun = time.process_time()
        try:
            outcome = SAME if attack.use(Path(line.strip())) == expected else DIFFERENT
        except ExportableCacheError as error:
            outcome, told = REFUSED, str(error)
        except BaseException:
            outcome, told = RAW, traceback.format_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - begun
        if seconds > _LONGEST and outcome != RAW:
            outcome, told = SLOW, f"{seconds:.0f} s; {told}"
        if ran:
            outcome, told = CODE, repr(ran)
        stream.write(json.dumps([outcome, told]) + "\n")
        stream.flush()


def fuzz(
    mutations: int,
    seed: int,
    targets: list[str],
    keep: Callable[[str, int, str, str], None],
    bundles: Path | None = None,
    only: str = "",
) -> dict[str, Counter]:
    """Outcomes of each attack, `mutations` in all.

    Args:
        bundles: Where bundles are kept that are attacked; they are made anew by default.
        keep: Told of every mutation: attack, seed, outcome, what was said.
        only: Part of the names of the attacks that are made.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        made = [attack for attack in attacks(work, targets, bundles) if only in attack.name]
        counts = {attack.name: Counter() for attack in made}
        for first in range(0, mutations, _A_WORKER * len(made)):
            for index, attack in enumerate(made):
                last = min(mutations, first + _A_WORKER * len(made))
                for number, outcome, said in tried(attack, range(first + index, last, len(made)), seed, work):
                    counts[attack.name][outcome] += 1
                    keep(attack.name, number, outcome, said)
    return counts


def tried(attack: Attack, numbers: Iterable[int], seed: int, work: Path) -> Iterator[tuple[int, str, str]]:
    """Seed, outcome and what was said of each of these mutations."""
    worker = None
    try:
        for number in numbers:
            folder = attack.mutated(seed + number, work)
            if worker is None or not worker.is_alive:
                worker = Worker(attack)
            yield seed + number, *worker.outcome(folder)
    finally:
        if worker is not None:
            worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default="operators,pt2,executorch,graphs")
    parser.add_argument("--only", default="", help="attacks whose name has this in it; all by default")
    parser.add_argument("--bundles", type=Path, help="folder to make the bundles in, and to find them in next time")
    parser.add_argument("--verbose", action="store_true", help="print every outcome that is none of the harmless ones")
    arguments = parser.parse_args()

    counts: dict[str, Counter] = {}
    done = 0

    def keep(name: str, seed: int, outcome: str, said: str) -> None:
        nonlocal done
        counts.setdefault(name, Counter())[outcome] += 1
        done += 1
        if arguments.verbose and done % 500 == 0:
            print(f"{done} mutations", flush=True)
        if arguments.verbose and outcome in (RAW, CRASH, CODE, SLOW):
            last = said.strip().splitlines()[-1:] or [""]
            print(f"{name}, seed {seed}: {outcome}: {last[0][:300]}", flush=True)

    # Interrupted, it says what it has found until then.
    with suppress(KeyboardInterrupt):
        targets = [name for name in arguments.targets.split(",") if name]
        fuzz(arguments.mutations, arguments.seed, targets, keep, arguments.bundles, arguments.only)
    columns = (REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE, SLOW)
    print(f"| attack | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, found in counts.items():
        print(f"| {name} | {' | '.join(str(found[column]) for column in columns)} |")
    print(f"{done} mutations")
    bad = sum(
        found[RAW]
        + found[CODE]
        + found[DIFFERENT] * ("unsealed" in name)
        + (found[CRASH] + found[SLOW]) * ("pt2" in name)
        for name, found in counts.items()
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
