"""Load two replicas under Ray Serve, and kill one of them during a response: which requests are lost?

    python -m benchmarks.replicas artifacts/demo          # from the repository's root, with ray[serve] installed

Clients send the same prompt repeatedly, and report a response that differs from the first one. After a third of the
requests, a replica is killed (SIGKILL) during a response. A request is lost if it gets no status at all; one that gets
a status of 500 or more is sent again, once. Times are those of this machine under this load, clients and replicas
together.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from export_scripts.serve_replicas import REPLICA_HEADER, ReplicaOptions, start

#: Prompt that the demo model continues up to the limit.
PROMPT = "the quiet farmer"
#: The limit of seconds for a response, and for the replacement of a replica.
PATIENCE = 120


@dataclass
class Outcome:
    """Result of one request.

    Attributes:
        status: HTTP status; None if the connection ended without one.
        replica: Replica that responded: machine and process id.
        seconds: Until the response was complete.
        said: Response or error.
        retried: True for a second attempt.
    """

    status: int | None
    replica: str | None
    seconds: float
    said: str
    retried: bool = False


@dataclass
class Found:
    """Results of a load, in numbers of requests and seconds.

    Attributes:
        answered, refused, lost: First attempts with status 200, with another status, and without one.
        answered_again: Refused requests that succeeded on the second attempt.
        different: Responses that differ from the first one.
        refusals: Error messages.
        median, longest: Seconds of responses.
        replaced_after: Seconds from the kill until another process responds.
    """

    requests: int
    answered: int
    refused: int
    lost: int
    answered_again: int
    different: int
    refusals: list[str]
    median: float
    longest: float
    replaced_after: float


@dataclass(frozen=True)
class Question:
    """Request that is sent repeatedly.

    Attributes:
        port: Port of the proxy on this machine.
        model: Model name.
        tokens: Largest number of tokens of a response.
    """

    port: int
    model: str
    tokens: int

    def ask(self, retried: bool = False) -> Outcome:
        """Send one request."""
        body = {"model": self.model, "prompt": PROMPT, "temperature": 0, "max_tokens": self.tokens}
        begun, replica, status = time.monotonic(), None, None
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            said, replica = response.read().decode(), response.getheader(REPLICA_HEADER)
            status = response.status
        except (OSError, http.client.HTTPException) as error:
            said = repr(error)
        finally:
            connection.close()
        if status == 200:
            said = json.loads(said)["choices"][0]["text"]
        return Outcome(status, replica, time.monotonic() - begun, said, retried)


class Load:
    """Concurrent clients, and the replica that is killed during their requests.

    Args:
        question: Request of all clients.
        clients: Number of concurrent clients.
        each: Requests per client.
    """

    def __init__(self, question: Question, clients: int, each: int) -> None:
        self.question, self.clients, self.each = question, clients, each
        self.outcomes: list[Outcome] = []
        self.killed_at: float | None = None
        self.replaced_after: float | None = None
        self._answered: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run all clients to the end."""
        with ThreadPoolExecutor(self.clients + 1) as pool:
            killer = pool.submit(self._kill)
            for client in [pool.submit(self._client) for _ in range(self.clients)]:
                client.result()
            killer.result()

    def until_replaced(self) -> None:
        """Send requests until a process responds that did not exist before the kill."""
        while self.replaced_after is None:
            if time.monotonic() - self.killed_at > PATIENCE:
                raise SystemExit(f"no other replica answers {PATIENCE} s after one was killed")
            self._note(self.question.ask())

    def _client(self) -> None:
        for _ in range(self.each):
            outcome = self.question.ask()
            self._note(outcome)
            if outcome.status is None or outcome.status >= 500:
                self._note(self.question.ask(retried=True))

    def _note(self, outcome: Outcome) -> None:
        now = time.monotonic()
        with self._lock:
            self.outcomes.append(outcome)
            if outcome.replica is None:
                return
            if self.killed_at is None:
                self._answered.setdefault(outcome.replica, []).append(now)
            elif outcome.replica not in self._answered and self.replaced_after is None:
                self.replaced_after = now - self.killed_at

    def _kill(self) -> None:
        """Kill a replica half a response's time after its last response, so that it is busy."""
        while len(self.outcomes) < self.clients * self.each // 3 or len(self._answered) < 2:
            time.sleep(0.01)
        with self._lock:
            replica, times = max(self._answered.items(), key=lambda one: one[1][-1])
            known = len(times)
        while len(self._answered[replica]) == known:
            time.sleep(0.001)
        time.sleep(statistics.median(after - before for before, after in pairwise(times)) / 2)
        with self._lock:
            self.killed_at = time.monotonic()
        os.kill(int(replica.rpartition(":")[2]), signal.SIGKILL)


def found(load: Load) -> Found:
    """Return the results of the load."""
    first = [one for one in load.outcomes if not one.retried]
    again = [one for one in load.outcomes if one.retried]
    answers = [one for one in load.outcomes if one.status == 200]
    refused = [one for one in first if one.status not in (None, 200)]
    seconds = sorted(one.seconds for one in answers)
    return Found(
        requests=len(first),
        answered=sum(one.status == 200 for one in first),
        refused=len(refused),
        lost=sum(one.status is None for one in first),
        answered_again=sum(one.status == 200 for one in again),
        different=sum(one.said != answers[0].said for one in answers),
        refusals=[f"{one.status}: {one.said}" for one in refused],
        median=round(statistics.median(seconds), 2),
        longest=round(seconds[-1], 2),
        replaced_after=round(load.replaced_after or 0, 1),
    )


def main(
    folder: Annotated[Path, typer.Argument(help="A bundle.")],
    clients: Annotated[int, typer.Option(help="That ask at a time.")] = 16,
    each: Annotated[int, typer.Option(help="Requests of a client.")] = 8,
    tokens: Annotated[int, typer.Option(help="The limit of tokens of a response.")] = 64,
    port: Annotated[int, typer.Option(help="Port of the proxy.")] = 8000,
) -> None:
    """Print the results of the load as JSON."""
    start(ReplicaOptions(folder, port=port))
    load = Load(Question(port, folder.resolve().name, tokens), clients, each)
    load.run()
    load.until_replaced()
    print(json.dumps(asdict(found(load)), indent=2))
    from ray import serve

    serve.shutdown()


if __name__ == "__main__":
    typer.run(main)
