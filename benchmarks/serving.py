"""Throughput and latency of a server with OpenAI's API, for clients that each send one request after another.

Start a server, then measure it with 1 and with 8 clients; any server that streams `/v1/completions` will do:

    exportable-cache serve demo --rows 8 --port 8000
    python benchmarks/serving.py http://127.0.0.1:8000 --clients 1 8 --requests 64

Prompts have mixed lengths and share beginnings, as chats with one system prompt do. Each request fixes the number of
new tokens; stop tokens end some earlier, so tokens are counted in the stream.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
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


def ask(address: str, body: dict[str, Any], measured: Measured) -> None:
    """Send one request, and note the times of its chunks."""
    connection = http.client.HTTPConnection(address, timeout=600)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {reply.read().decode()[:200]}")
    times = [
        time.perf_counter() for line in reply if line.startswith(b"data: {") and json.loads(line[6:]).get("choices")
    ]
    connection.close()
    with measured.lock:
        measured.tokens += len(times)
        measured.first.append(times[0] - start)
        measured.between += [after - before for before, after in zip(times, times[1:])]


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


def main() -> None:
    """Measure a server, and print a row of a table for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=60, help="Longest prompt.")
    parser.add_argument("--ignore-eos", action="store_true", help="Send ignore_eos, which llama.cpp's server takes.")
    given = parser.parse_args()
    address = urlsplit(given.url).netloc
    with urlopen(f"{given.url}/v1/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    extra = {"ignore_eos": True} if given.ignore_eos else {}
    bodies = [
        {"model": model, "prompt": text, "max_tokens": given.new_tokens, "temperature": 0, "stream": True, **extra}
        for text in prompts(given.requests, given.words)
    ]
    run(address, bodies[:2], 1)
    print("| clients | tokens/s | first token, ms: p50, p95 | between tokens, ms: p50, p95, p99 |\n|---|---|---|---|")
    for clients in given.clients:
        seconds, found = run(address, bodies, clients)
        first = ", ".join(f"{percentile(found.first, percent):.0f}" for percent in (50, 95))
        between = ", ".join(f"{percentile(found.between, percent):.1f}" for percent in (50, 95, 99))
        print(f"| {clients} | {found.tokens / seconds:.1f} | {first} | {between} |", flush=True)


if __name__ == "__main__":
    main()
