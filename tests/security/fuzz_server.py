"""Odd requests to a server over a tiny model: what is said of each. A part of `make fuzz`, or
`python -m tests.security.fuzz_server --help`.

The server runs in a process of its own, so that a crash is counted and not suffered; it is started again then.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

from .odd_requests import Sent, made

ANSWERED, REFUSED, LEFT = "answered", "refused", "client left"
#: What may not come.
FAILED, HANG, CRASH, FOREIGN = "status 500", "hang", "crash", "foreign words"
COLUMNS = (ANSWERED, REFUSED, LEFT, FAILED, HANG, CRASH, FOREIGN)
_BAD = (FAILED, HANG, CRASH, FOREIGN)
#: Seconds that a request may take, and after which one that takes them is given up.
MOST_SECONDS, _GIVEN_UP = 5, 60
#: How sentences of pydantic, of Python and of Rust begin.
_FOREIGN = ("Input should", "Extra inputs", "Field required", "Traceback", "panicked", "Value error,")
_SERVER = """
import signal, sys, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from exportable_cache import ExportableCache, Session
from exportable_cache.cli.server.app import ServerOptions, make_app
from exportable_cache.cli.server.app import run
from exportable_cache.decoding import Completer
from tests.decoding.byte_tokenizer import SIZE, byte_tokenizer
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=512, initializer_range=0.125, eos_token_id=SIZE - 1, bos_token_id=None, pad_token_id=0,
)).eval()
session = Session.from_model(model, ExportableCache.from_model(model, 512), tokenizer=byte_tokenizer(chat=True))
run(make_app(Completer(session), ServerOptions("m")), "127.0.0.1", 0, lambda address: print(address, flush=True))
"""


class Server:
    """A server in a process of its own.

    Args:
        command: Starts it, and prints its address; a server over a tiny model by default.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-c", _SERVER)) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=root
        )
        output, lines = self._process.stdout, list[str]()
        assert output is not None
        while not (found := re.search(r"http://[\d.]+:(\d+)", lines[-1] if lines else "")):
            lines.append(output.readline())
            if not lines[-1]:
                raise RuntimeError(f"the server does not start: {''.join(lines)[-2000:]}")
        self.port = int(found[1])
        # Read on, because a full pipe would block the server.
        self.rest = list[str]()
        Thread(target=lambda: self.rest.extend(output), daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    @property
    def memory(self) -> int:
        """Resident memory of the process in MiB."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4096 >> 20

    def close(self) -> float:
        """End it as a supervisor would, and return the seconds that took."""
        start = time.perf_counter()
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return time.perf_counter() - start


def outcome_of(port: int, sent: Sent) -> tuple[str, str, float]:
    """Send a request: what came of it, what was said, and the seconds until all of it was there."""
    start = time.perf_counter()
    try:
        reply = _reply(port, sent)
    except TimeoutError:
        return HANG, f"no answer within {_GIVEN_UP} s", time.perf_counter() - start
    except OSError as error:
        # It closes a connection on which something is wrong; whether it has gone is looked at then.
        return REFUSED, f"the connection was closed: {error}", time.perf_counter() - start
    seconds = time.perf_counter() - start
    if sent.leaves is not None:
        return LEFT, "", seconds
    return *_judged(reply), seconds


def _reply(port: int, sent: Sent) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=_GIVEN_UP) as connection:
        connection.sendall(sent.data)
        if sent.leaves is not None:
            time.sleep(sent.leaves)
            return b""
        # A body that is shorter than it was said to be: nothing more comes.
        if not select.select([connection], [], [], 0.5)[0]:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def _judged(reply: bytes) -> tuple[str, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not reply or len(words) < 2 or not words[1].isdigit():
        return REFUSED, "the connection was closed"
    status, text = int(words[1]), body.decode("utf-8", "replace")
    if status >= 500 and status != 503:
        return FAILED, text[:500]
    if status < 400:
        is_cut = b"text/event-stream" in head and '"error"' not in text and "[DONE]" not in text
        return (FAILED, f"a stream without an end: {text[-300:]}") if is_cut else (ANSWERED, "")
    foreign = any(word in text for word in _FOREIGN)
    return (FOREIGN if foreign else REFUSED), text[:500]


def fuzz(requests: int, seed: int, keep: Callable[[int, Sent, str, str, float], None], server: Server) -> Server:
    """Send requests one after another.

    Args:
        requests: How many.
        seed: Of the first; the next ones follow.
        keep: Told of each: seed, request, outcome, what was said, seconds.
        server: To begin with.

    Returns:
        The server that is running at the end.
    """
    for number in range(seed, seed + requests):
        sent = made(number)
        outcome, said, seconds = outcome_of(server.port, sent)
        if outcome == REFUSED and said.startswith("the connection") and not _still(server):
            outcome, said = CRASH, "the process has ended"
        elif outcome != HANG and seconds > MOST_SECONDS:
            outcome, said = HANG, f"{seconds:.1f} s, {outcome}: {said}"
        keep(number, sent, outcome, said, seconds)
        if outcome in (HANG, CRASH):
            server.close()
            server = Server()
    return server


def _still(server: Server) -> bool:
    # A process that was killed is not gone at once.
    time.sleep(0.1)
    return server.is_alive


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz_server", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every outcome that may not come")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    slowest = 0.0

    def keep(number: int, sent: Sent, outcome: str, said: str, seconds: float) -> None:
        nonlocal slowest
        counts.setdefault(sent.path, Counter())[outcome] += 1
        slowest = max(slowest, seconds)
        if arguments.verbose and outcome in _BAD:
            print(f"seed {number}, {sent.path}: {outcome}: {said[:300]!r}", flush=True)

    server = Server()
    before = server.memory
    server = fuzz(arguments.requests, arguments.seed, keep, server)
    print(f"| route | {' | '.join(COLUMNS)} |")
    print(f"|---|{'---|' * len(COLUMNS)}")
    for path in sorted(counts, key=lambda path: -counts[path].total()):
        print(f"| `{path}` | {' | '.join(str(counts[path][column]) for column in COLUMNS)} |")
    after = server.memory
    print(f"{arguments.requests} requests, the slowest took {slowest:.1f} s; {before} MiB at first, {after} at the end")
    print(f"the server ended {server.close():.1f} s after it was told to")
    print(json.dumps(sum(counts.values(), Counter())))
    sys.exit(any(found[column] for found in counts.values() for column in _BAD))


if __name__ == "__main__":
    main()
