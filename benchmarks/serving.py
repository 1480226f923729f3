"""Throughput and latency of servers with OpenAI's API, for clients that each send one request after another.

Measure a running server with 1 and with 8 clients; any server that streams `/v1/completions` will do:

    exportable-cache serve demo --rows 8 --port 8000
    python benchmarks/serving.py http://127.0.0.1:8000 --clients 1 8 --requests 64

Or start several servers, one after another, and measure each. `{port}` is replaced by a free port:

    python benchmarks/serving.py --clients 1 8 --neighbour 1000 --end-token 151645 \\
        --start "one row=exportable-cache serve artifacts/one --port {port}" \\
        --start "8 rows=exportable-cache serve artifacts/rows --port {port}" \\
        --start "llama.cpp=llama-server -m model.gguf -np 8 -c 16384 --port {port}"

Prompts have mixed lengths and share beginnings, as chats with one system prompt do. Each request fixes the number of
new tokens; stop tokens end some earlier, so tokens are counted in the stream. `--neighbour N` measures how long a
stream waits for its next token while the prompt of another client, of N tokens, is fed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

WORDS = ["amber", "paper", "stone", "river", "it rested.", "the code of", "is 4821.", "is 77.", "where is", "north of"]


@dataclass
class Measured:
    """The measurements of the clients of one run.

    Attributes:
        tokens: Number of chunks with text.
        first: Seconds from each request to its first chunk.
        between: Seconds between two chunks of one stream.
    """

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def prompts(count: int, words: int) -> list[str]:
    """Return prompts of up to `words` words, half of which begin with the same ones."""
    chooses = random.Random(0)
    shared = " ".join(chooses.choices(WORDS, k=words // 2))
    return [
        f"{shared if index % 2 else ''} {' '.join(chooses.choices(WORDS, k=chooses.randint(1, max(1, words // 2))))}"
        for index in range(count)
    ]


def chunk_times(address: str, body: dict[str, Any], seen: Callable[[int], None] = lambda count: None) -> list[float]:
    """Send one request, and return the time of each of its chunks; `seen` is called with their number so far."""
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {reply.read().decode()[:200]}")
    times: list[float] = []
    for line in reply:
        if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
            times.append(time.perf_counter())
            seen(len(times))
    connection.close()
    return times


def ask(address: str, body: dict[str, Any], measured: Measured) -> None:
    """Send one request, and note the times of its chunks."""
    start = time.perf_counter()
    times = chunk_times(address, body)
    with measured.lock:
        measured.tokens += len(times)
        measured.first.append(times[0] - start)
        measured.between += [after - before for before, after in zip(times, times[1:])]


def wait_beside(address: str, body: dict[str, Any], length: int) -> tuple[float, float, float]:
    """Measure a stream while the prompt of a neighbour, of `length` tokens, is fed.

    Returns:
        The longest time between two chunks before that and during it, and the time until the neighbour's first token,
        all in seconds.
    """
    begun, found = threading.Event(), list[float]()

    def neighbour() -> None:
        begun.wait()
        # Token ids, so that the length is known. The first one is new each time, so that no prefix is reused.
        prompt = [10 + time.time_ns() % 80, *(10 + index * 7 % 83 for index in range(length - 1))]
        found.append(time.perf_counter())
        found.append(chunk_times(address, {**body, "prompt": prompt, "max_tokens": 1})[0])

    thread = threading.Thread(target=neighbour)
    thread.start()
    times = chunk_times(address, body, lambda count: begun.set() if count == 20 else None)
    begun.set()
    thread.join()
    sent, first = found
    gaps = list(zip(times, times[1:]))
    before = [end - start for start, end in gaps[2:] if end <= sent]
    during = [end - start for start, end in gaps if end > sent and start < first]
    if not before or not during:
        raise RuntimeError(f"the stream ended after {len(times)} tokens; forbid its end with --end-token")
    return max(before), max(during), first - sent


@contextmanager
def started(command: str) -> Iterator[str]:
    """Run a server until the block ends, and yield its URL once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        shlex.split(command.replace("{port}", str(port))), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended with {process.returncode}")
            try:
                with urlopen(f"{url}/health", timeout=10):
                    break
            except OSError:  # not listening yet, or 503 while it loads
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def run(address: str, bodies: list[dict[str, Any]], clients: int) -> tuple[float, Measured]:
    """Return the seconds that the clients took for all requests, and what they measured."""
    waiting, measured, failed = iter(bodies), Measured(), []
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                body = next(waiting, None)
            if body is None:
                return
            try:
                ask(address, body, measured)
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - start, measured


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return 1e3 * (statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else values[0])


def measure(name: str, url: str, given: argparse.Namespace) -> None:
    """Print a row of the table for each number of clients, and one for the neighbour's prompt."""
    address = urlsplit(url).netloc
    with urlopen(f"{url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    extra: dict[str, Any] = {"ignore_eos": True} if given.ignore_eos else {}
    if given.end_token:
        extra["logit_bias"] = {str(token): -100 for token in given.end_token}
    common = {"model": model, "max_tokens": given.new_tokens, "temperature": 0, "stream": True, **extra}
    bodies = [{**common, "prompt": text} for text in prompts(given.requests, given.words)]
    run(address, bodies[:2], 1)
    for clients in given.clients:
        seconds, found = run(address, bodies, clients)
        first = ", ".join(f"{percentile(found.first, percent):.0f}" for percent in (50, 95))
        between = ", ".join(f"{percentile(found.between, percent):.1f}" for percent in (50, 95, 99))
        print(f"| {name} | {clients} | {found.tokens / seconds:.1f} | {first} | {between} |", flush=True)
    if given.neighbour:
        body = {**bodies[0], "max_tokens": given.neighbour_tokens}
        waits = [wait_beside(address, body, given.neighbour) for _ in range(3)]
        before, during, first = (1e3 * statistics.median(column) for column in zip(*waits, strict=True))
        print(
            f"{name}: longest wait of a stream {before:.0f} ms, during a prompt of {given.neighbour} tokens "
            f"{during:.0f} ms; first token of that prompt after {first:.0f} ms (medians of 3)",
            flush=True,
        )


def main() -> None:
    """Measure servers, and print their rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="A running server.")
    parser.add_argument("--start", action="append", default=[], metavar="NAME=COMMAND", help="A server to start.")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=60, help="Longest prompt.")
    parser.add_argument("--neighbour", type=int, metavar="TOKENS", help="Measure a stream during such a prompt.")
    parser.add_argument("--neighbour-tokens", type=int, default=200, help="Length of that stream.")
    parser.add_argument("--end-token", type=int, nargs="+", metavar="ID", help="Tokens that responses must not have.")
    parser.add_argument("--ignore-eos", action="store_true", help="Send ignore_eos, which llama.cpp's server takes.")
    given = parser.parse_args()
    if bool(given.url) == bool(given.start):
        parser.error("pass the URL of a running server, or --start")
    print(
        "| server | clients | tokens/s | first token, ms: p50, p95 | between tokens, ms: p50, p95, p99 |\n"
        "|---|---|---|---|---|",
        flush=True,
    )
    if given.url:
        measure("server", given.url, given)
    for one in given.start:
        name, _, command = one.partition("=")
        with started(command) as url:
            measure(name, url, given)


if __name__ == "__main__":
    main()
