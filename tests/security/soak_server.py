"""Soak a server: 16 clients of which some disconnect, adapters, odd requests. A part of `make soak`, or
`python -m tests.security.soak_server --help`.

Each response is compared with that of the same request alone, and the memory of the server's process is noted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from exportable_cache.demo import demo_path
from exportable_cache.models.loading.loading import load_model

from ..support.streams import requests, streamed
from ..test_adapters import adapted
from . import fuzz_server
from .fuzz_server import Server
from .odd_requests import made
from .soak import Soaked

CLIENTS = 16
#: Name of the model that the odd requests ask for.
NAME = "m"
#: Outcomes of odd requests that must not happen. A slow one is none, because others run at the same time.
_BAD = (fuzz_server.FAILED, fuzz_server.CRASH, fuzz_server.FOREIGN)


def soak(
    seconds: float, server: Server, models: list[str], pause: float, keep: Callable[[str], None] = lambda line: None
) -> tuple[Soaked, Counter[str]]:
    """Let clients send requests until some time has passed.

    Args:
        seconds: Time.
        server: The server, whose memory is noted.
        models: Names of the models that requests choose.
        pause: Mean seconds of a client between two requests.
        keep: Called with a line each minute.

    Returns:
        What came of the requests, and the outcomes of the odd ones.
    """
    address = f"127.0.0.1:{server.port}"
    kinds = requests(8 * len(models), models, words=30)
    expected = [streamed(address, body) for body in kinds]
    found, odd, lock = Soaked(), Counter[str](), threading.Lock()
    start = time.monotonic()
    end = start + seconds

    def client(number: int) -> None:
        chooses = random.Random(number)
        seed = number * 1_000_000
        try:
            while time.monotonic() < end:
                time.sleep(chooses.uniform(0, 2 * pause))
                if chooses.random() < 0.2:
                    seed += 1
                    outcome, said, _ = fuzz_server.outcome_of(server.port, made(seed))
                    with lock:
                        odd[outcome] += 1
                        if outcome in _BAD:
                            found.errors.append(f"odd request {seed}: {outcome}: {said[:300]}")
                    continue
                kind, leaves = chooses.randrange(len(kinds)), chooses.choice([None, None, None, 1, 2])
                text = streamed(address, kinds[kind], leaves)
                with lock:
                    found.answers += 1
                    found.wrong += text is not None and text != expected[kind]
        except Exception as error:
            with lock:
                found.errors.append(f"{type(error).__name__}: {error}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    while any(one.is_alive() for one in clients):
        found.memory.append((time.monotonic() - start, server.memory))
        if len(found.memory) % 60 == 0:
            keep(f"{found.memory[-1][0]:.0f} s: {found.answers} responses, {found.wrong} wrong, {server.memory} MiB")
        time.sleep(min(1.0, seconds / 20))
    return found, odd


def started(work: Path, rows: int) -> tuple[Server, list[str]]:
    """Start `serve demo` with two random adapters, and return it with the names of its models."""
    names = ["one", "two"]
    for seed, name in enumerate(names):
        adapted(seed, load_model(demo_path()).model).save_pretrained(work / name)
    adapters = [part for name in names for part in ("--adapter", f"{name}={work / name}")]
    command = [sys.executable, "-m", "exportable_cache", "serve", "demo", "--port", "0", "--name", NAME]
    server = Server([*command, "--rows", str(rows), "--prefix-cache", "16", "--no-compile", *adapters])
    return server, [NAME, *(f"{NAME}:{name}" for name in names)]


def main() -> None:
    """Soak a server, and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.soak_server", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--pause", type=float, default=4, help="mean seconds of a client between two requests")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        server, models = started(Path(work), given.rows)
        found, odd = soak(given.seconds, server, models, given.pause, lambda line: print(line, flush=True))
        sizes = [size for _, size in found.memory]
        took = server.close()
    print(
        f"{CLIENTS} clients of {given.rows} rows, {given.seconds:.0f} s: {found.answers} responses, {found.wrong} "
        f"wrong; {odd.total()} odd requests: {json.dumps(odd)}; {len(found.errors)} errors; "
        f"{sizes[len(sizes) // 4]} MiB after a quarter of the time, {sizes[-1]} at the end, {found.growth:+.2f} MiB a "
        f"minute; ended in {took:.1f} s"
    )
    for error in found.errors:
        print(error)
    sys.exit(bool(found.wrong or found.errors))


if __name__ == "__main__":
    main()
