"""Mutated bundles, saved states and saved caches: what opening and running each does. `make fuzz`, or
`python -m tests.security.fuzz --help`.

Each mutation is tried in a copy of this process (POSIX only), so that a crash is counted and not suffered. Sealed ones
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
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.bundle.manifest import MANIFEST_FILE, checksum_of
from exportable_cache.errors import ExportableCacheError

from ..support.models import tiny_model, tokens

#: What may come of a mutation.
REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE = "refused", "same output", "other output", "raw error", "crash", "code run"
_SECONDS = 60
_PROMPT = [5, 6, 7]
_STEPS = 3
_RAW = 70
_CODES = {REFUSED: 11, SAME: 12, DIFFERENT: 13, RAW: _RAW, CODE: 14}


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


# -- mutations -------------------------------------------------------------------------------------------------------


def flip(data: bytes, choose: random.Random) -> bytes:
    """1 to 4 bytes changed."""
    found = bytearray(data)
    start = choose.randrange(len(found))
    for index in range(start, min(start + choose.randint(1, 4), len(found))):
        found[index] = choose.randrange(256)
    return bytes(found)


def cut(data: bytes, choose: random.Random) -> bytes:
    """The end gone, or a piece in the middle."""
    start = choose.randrange(len(data))
    return data[:start] if choose.random() < 0.5 else data[:start] + data[start + choose.randint(1, 64) :]


def repeat(data: bytes, choose: random.Random) -> bytes:
    """A piece there twice."""
    start = choose.randrange(len(data))
    end = start + choose.randint(1, 64)
    return data[:end] + data[start:end] + data[end:]


_INTERESTING = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def number(data: bytes, choose: random.Random) -> bytes:
    """Four or eight bytes that are a size or an offset near a limit."""
    width = choose.choice((4, 8))
    if len(data) < width:
        return flip(data, choose)
    start = choose.randrange(len(data) - width + 1)
    value = choose.choice(_INTERESTING) % 2 ** (8 * width)
    return data[:start] + value.to_bytes(width, "little") + data[start + width :]


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "x" * 300,
    "../../etc/passwd",
    [],
    {},
    [[[]]],
    "torch.os.system",
)


def value(data: bytes, choose: random.Random) -> bytes:
    """One value of a JSON document another one; of other files, bytes."""
    try:
        document = json.loads(data)
    except ValueError:
        return flip(data, choose)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(document)
    if not places:
        return flip(data, choose)
    node, key = choose.choice(places)
    if isinstance(node, dict) and choose.random() < 0.2:
        del node[key]
    else:
        node[key] = choose.choice(_VALUES)
    return json.dumps(document).encode()


MUTATIONS = (flip, cut, repeat, number, value)


def mutate(path: Path, choose: random.Random, head: int | None) -> None:
    """Change a file in place, its first `head` bytes where that is given."""
    data = path.read_bytes()
    head = len(data) if head is None else min(head, len(data))
    changed = choose.choice(MUTATIONS)(data[:head], choose) + data[head:]
    path.write_bytes(changed)


def mutate_archive(path: Path, choose: random.Random) -> None:
    """Change one entry of a `.pt2`, so that the change gets past the zip."""
    from .archives import entries_of, rewritten

    entries = entries_of(path)
    texts = [name for name in entries if name.endswith(".json")]
    name = choose.choice(texts)
    entries[name] = choose.choice((value, value, value, flip, cut))(entries[name], choose)
    rewritten(path, entries)


# -- what is attacked ------------------------------------------------------------------------------------------------


class Attack:
    """One kind of thing that is opened, and how.

    Args:
        source: The folder, whole.
        use: Opens a folder and gives numbers that an unharmed one gives.
        sealed: Whether checksums are made right.
        change: Mutates a copy.
    """

    def __init__(
        self,
        name: str,
        source: Path,
        use: Callable[[Path], Any],
        change: Callable[[Path, random.Random], None],
        sealed: bool,
    ) -> None:
        self.name, self.source, self.use, self.change, self.sealed = name, source, use, change, sealed

    def outcome(self, seed: int, work: Path, expected: Any) -> tuple[str, str]:
        """What one mutation does, and what it said."""
        folder = work / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.source, folder)
        self.change(folder, random.Random(seed))
        if self.sealed:
            reseal(folder)
        told = work / "told"
        told.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os._exit(self._in_child(folder, told, expected))
        status = os.waitpid(child, 0)[1]
        said = told.read_text() if told.exists() else ""
        if os.WIFSIGNALED(status):
            return CRASH, f"signal {os.WTERMSIG(status)}"
        return {code: name for name, code in _CODES.items()}.get(os.WEXITSTATUS(status), CRASH), said

    def _in_child(self, folder: Path, told: Path, expected: Any) -> int:
        faulthandler.disable()
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        signal.alarm(_SECONDS)
        # A claim of more memory than there is becomes an error, as it would on a small machine.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), used + (4 << 30)))
        ran: list[str] = []
        watched = (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.mkdir",
            "os.remove",
            "socket.connect",
            "pickle.find_class",
        )
        sys.addaudithook(lambda event, _: ran.append(event) if event in watched else None)
        try:
            found = self.use(folder)
            outcome = SAME if found == expected else DIFFERENT
        except ExportableCacheError as error:
            outcome = REFUSED
            told.write_text(str(error))
        except BaseException:
            outcome = RAW
            told.write_text(traceback.format_exc())
        if ran:
            outcome = CODE
            told.write_text(repr(ran))
        return _CODES[outcome]


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


def attacks(work: Path, targets: list[str]) -> list[Attack]:
    """Everything that is attacked, made now."""
    found = []
    for target in targets:
        source = work / target
        export("demo", target, 96, source, prefill_chunk=16, verify=False)
        found += [
            Attack(f"{target}, any file, unsealed", source, _opened, _any_file, False),
            Attack(f"{target}, any file, sealed", source, _opened, _any_file, True),
            Attack(f"{target}, program, sealed", source, _opened, _program, True),
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
    found.append(Attack("session state", work / "state", state, _only_file, False))
    found.append(Attack("saved cache", work / "cache", cache, _only_file, False))
    return found


def fuzz(
    mutations: int, seed: int, targets: list[str], keep: Callable[[str, int, str, str], None]
) -> dict[str, Counter]:
    """Outcomes of each attack, `mutations` in all.

    Args:
        keep: Told of every mutation: attack, seed, outcome, what was said.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: dict[str, Counter] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        made = attacks(work, targets)
        for attack in made:
            counts[attack.name] = Counter()
        expected: dict[str, Any] = {}
        for index in range(mutations):
            attack = made[index % len(made)]
            if attack.name not in expected:
                # In a child as well: libraries that start threads do not survive a fork.
                expected[attack.name] = _expected(attack, work)
            outcome, said = attack.outcome(seed + index, work, expected[attack.name])
            counts[attack.name][outcome] += 1
            keep(attack.name, seed + index, outcome, said)
    return counts


def _expected(attack: Attack, work: Path) -> Any:
    path = work / "expected.json"
    child = os.fork()
    if child == 0:
        try:
            path.write_text(json.dumps(attack.use(attack.source)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"{attack.name}: what is attacked does not work itself")
    return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default="pt2,executorch")
    parser.add_argument("--verbose", action="store_true", help="print every outcome that is none of the harmless ones")
    arguments = parser.parse_args()

    def keep(name: str, seed: int, outcome: str, said: str) -> None:
        if arguments.verbose and outcome in (RAW, CRASH, CODE):
            last = said.strip().splitlines()[-1:] or [""]
            print(f"{name}, seed {seed}: {outcome}: {last[0][:300]}", flush=True)

    counts = fuzz(arguments.mutations, arguments.seed, arguments.targets.split(","), keep)
    columns = (REFUSED, SAME, DIFFERENT, RAW, CRASH, CODE)
    print(f"| attack | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, found in counts.items():
        print(f"| {name} | {' | '.join(str(found[column]) for column in columns)} |")
    bad = sum(found[RAW] + found[CODE] for found in counts.values())
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
