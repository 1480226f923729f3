"""Mutated bundles, saved states and saved caches: what opening and running each does. `make fuzz`, or
`python -m tests.security.fuzz --help`.

Mutations are tried in copies of this process (POSIX only), so that a crash is counted and not suffered. Sealed ones
have every checksum made right again, as anybody can.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.known_digests import record_path
from exportable_cache.bundle.manifest import MANIFEST_FILE, checksum_of
from exportable_cache.common import own_files
from exportable_cache.common.own_key import own_key
from exportable_cache.errors import ExportableCacheError, InputError

from ..support.models import tiny_model, tokens
from .mutations import MUTATIONS, mutate, mutate_archive

#: What may come of a mutation.
REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE = "refused", "same output", "other output", "raw error", "crash", "code run"
_SECONDS = 60
#: Mutations that one process tries, so that none meets what many before it have left.
_A_WORKER = 100
_PROMPT = [5, 6, 7]
_STEPS = 3
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


def reseal(folder: Path) -> None:
    """Make every checksum right again."""
    path = folder / MANIFEST_FILE
    try:
        fields = json.loads(path.read_text())
        for name, file in fields["files"].items():
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                file.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        fields["checksum"] = checksum_of(fields)
        path.write_text(json.dumps(fields))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # no manifest any more


class Attack:
    """One kind of thing that is opened, and how.

    Args:
        source: The folder, whole.
        use: Opens a folder and gives numbers that an unharmed one gives.
        change: Mutates a copy.
        sealed: Makes checksums right, where that is asked for.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        use: Callable[[Path], Any],
        change: Callable[[Path, random.Random], None],
        sealed: Callable[[Path], None] | None = None,
    ) -> None:
        self.name, self.source, self.use, self.change, self.sealed = name, source, use, change, sealed

    def mutated(self, seed: int, work: Path) -> Path:
        """A copy, changed."""
        folder = work / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.source, folder)
        self.change(folder, random.Random(seed))
        if self.sealed is not None:
            self.sealed(folder)
        return folder


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
        try:
            outcome = SAME if attack.use(Path(line.strip())) == expected else DIFFERENT
        except ExportableCacheError as error:
            outcome, told = REFUSED, str(error)
        except BaseException:
            outcome, told = RAW, traceback.format_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if ran:
            outcome, told = CODE, repr(ran)
        stream.write(json.dumps([outcome, told]) + "\n")
        stream.flush()


def _answer(session: Session) -> list[float]:
    logits = session.prefill(torch.tensor([_PROMPT]))
    found = logits[0, :8].tolist()
    for _ in range(_STEPS):
        logits = session.decode(logits.argmax(-1))
        found += logits[0, :8].tolist()
    return found


def _opened(folder: Path) -> list[float]:
    return _answer(load(folder))


def _any_file(folder: Path, choose: random.Random) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = choose.choice(files)
    # In large files the tables, not the weights: those may be anything.
    mutate(path, choose, None if path.stat().st_size < 100_000 else choose.choice((4096, 100_000)))


def _program(folder: Path, choose: random.Random) -> None:
    path = next(path for path in folder.iterdir() if path.name.startswith("program"))
    if path.suffix == ".pt2" and choose.random() < 0.8:
        mutate_archive(path, choose)
    else:
        mutate(path, choose, None if path.suffix == ".pt2" else 60_000)


def _only_file(folder: Path, choose: random.Random) -> None:
    mutate(next(folder.iterdir()), choose, choose.choice((None, 2000)))


def attacks(work: Path, targets: list[str], bundles: Path | None = None) -> list[Attack]:
    """Everything that is attacked, made now, but for bundles that are in `bundles` already."""
    found = []
    for target in targets:
        if target == GRAPHS:
            found += _graph_attacks(work)
            continue
        source, small = ((bundles or work) / name for name in (target, f"{target}_small"))
        if not source.exists():
            export("demo", target, 96, source, prefill_chunk=16, verify=False)
        # Of one layer: most of what a mutation costs is reading the rest.
        if not small.exists():
            model = tiny_model("gemma2", num_hidden_layers=1, layer_types=["sliding_attention"])
            export(model, target, 32, small, prefill_chunk=8, verify=False)
        found += [
            Attack(f"{target}, any file, unsealed", source, _opened, _any_file),
            Attack(f"{target}, any file, sealed", source, _opened, _any_file, reseal),
            Attack(f"{target}, program, sealed", small, _opened, _program, reseal),
        ]
    model = tiny_model("gemma2")
    session = Session.from_model(model, ExportableCache.from_model(model, 48))
    session.prefill(tokens(20))
    (work / "state").mkdir()
    session.save_state(work / "state" / "state.safetensors")
    (work / "cache").mkdir()
    session.cache.save(work / "cache" / "cache.safetensors")

    def state(folder: Path) -> list[float]:
        other = Session.from_model(model, ExportableCache.from_model(model, 48))
        other.load_state(folder / "state.safetensors")
        return other.decode(torch.tensor([3]))[0, :8].tolist()

    def cache(folder: Path) -> list[float]:
        loaded = ExportableCache.load(folder / "cache.safetensors")
        return Session.from_model(model, loaded).decode(torch.tensor([3]))[0, :8].tolist()

    session.close()
    found.append(Attack("session state", work / "state", state, _only_file))
    found.append(Attack("saved cache", work / "cache", cache, _only_file))
    return found


GRAPHS = "graphs"


def _graph_attacks(work: Path) -> list[Attack]:
    """On a folder of compiled graphs: damaged, and one that somebody else has planted, whole or not."""
    model = tiny_model("llama", num_hidden_layers=1)
    source = work / GRAPHS
    child = os.fork()
    if child == 0:
        # Compiling starts threads.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        try:
            _graph(model, source, compile=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("no graph was kept")

    def opened(folder: Path) -> list[float]:
        return _graph(model, folder, compile=False)

    def planted(folder: Path, choose: random.Random) -> None:
        path = next(folder.iterdir())
        content = own_files.unsealed(path.read_bytes(), own_key(), path.name)
        if choose.random() < 0.5:
            content = choose.choice(MUTATIONS)(content, choose)
        # By somebody who does not know the key, or can write there, too.
        if choose.random() < 0.5:
            path.write_bytes(own_files.sealed(content, choose.randbytes(32), path.name))
        else:
            path.write_bytes(own_files.sealed(content, own_key(), path.name))
            choose.choice((path, folder)).chmod(choose.choice((0o777, 0o766, 0o722)))

    return [
        Attack("graph cache, damaged", source, opened, _only_file),
        Attack("graph cache, planted by others, sealed", source, opened, planted),
    ]


def _graph(model: Any, folder: Path, compile: bool) -> list[float]:
    """Logits of a step by a graph from a folder, which is compiled first where asked for.

    Raises:
        InputError: If no graph is taken from it. (A session compiles one then.)
    """
    if not compile:
        torch.compile = _not_compiled
    cache = ExportableCache.from_model(model, 16)
    with Session.from_model(model, cache, compile="wait", buckets=False, graph_cache=folder) as session:
        return session.decode(torch.tensor([3]))[0, :8].tolist()


def _not_compiled(*arguments: Any, **options: Any) -> Any:
    raise InputError("no graph is taken from the folder")


def fuzz(
    mutations: int,
    seed: int,
    targets: list[str],
    keep: Callable[[str, int, str, str], None],
    bundles: Path | None = None,
) -> dict[str, Counter]:
    """Outcomes of each attack, `mutations` in all.

    Args:
        bundles: Where bundles are kept that are attacked; they are made anew by default.
        keep: Told of every mutation: attack, seed, outcome, what was said.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        made = attacks(work, targets, bundles)
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
    parser.add_argument("--targets", default="pt2,executorch,graphs")
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
        if arguments.verbose and outcome in (RAW, CRASH, CODE):
            last = said.strip().splitlines()[-1:] or [""]
            print(f"{name}, seed {seed}: {outcome}: {last[0][:300]}", flush=True)

    # Interrupted, it says what it has found until then.
    with suppress(KeyboardInterrupt):
        fuzz(arguments.mutations, arguments.seed, arguments.targets.split(","), keep, arguments.bundles)
    columns = (REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE)
    print(f"| attack | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, found in counts.items():
        print(f"| {name} | {' | '.join(str(found[column]) for column in columns)} |")
    print(f"{done} mutations")
    bad = sum(found[RAW] + found[CODE] + found[DIFFERENT] * ("unsealed" in name) for name, found in counts.items())
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
