"""A server over a session, in a thread, and the requests that tests send to it."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from exportable_cache import Session

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

import openai

from exportable_cache.cli.server.app import ServerOptions, make_app, run
from exportable_cache.decoding import Completer
from exportable_cache.decoding.completion import AnyCompleter

from ..conftest import DEMO_MAX_CACHE_LEN as MAX_CACHE_LEN
from ..support.waiting import wait_until

__all__ = ["MAX_CACHE_LEN"]
QUESTION = "the code of amber is 4821. amber?"
JSON = {"Content-Type": "application/json"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "demo", "prompt": "x"}


@contextmanager
def served(session: Session | AnyCompleter, **options: Any) -> Iterator[str]:
    """An address where a session, or what completes prompts over it, answers, as from the command, in a thread."""
    import uvicorn

    found: list[str] = []
    servers: list[uvicorn.Server] = []
    listens = threading.Event()

    def started(address: str) -> None:
        found.append(address)
        listens.set()

    class Noted(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

        async def main_loop(self) -> None:
            """Look ten times as often as uvicorn does whether the server is to end."""
            ticks = itertools.count()
            while not await self.on_tick(next(ticks)):
                await asyncio.sleep(0.01)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """End as uvicorn does, with a tenth of its waits for connections, which are 0.1 s."""
            sleep = asyncio.sleep
            with mock.patch.object(asyncio, "sleep", lambda seconds: sleep(seconds / 10)):
                await super().shutdown(sockets)

    completer = Completer(session) if isinstance(session, Session) else session
    app = make_app(completer, ServerOptions(**{"model_name": "demo", **options}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Noted)
        thread = threading.Thread(target=run, args=(app, "127.0.0.1", 0, started))
        thread.start()
        assert listens.wait(20)
        try:
            yield found[0]
        finally:
            wait_until(lambda: servers)
            servers[0].should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@contextmanager
def served_natively(bundle: Path) -> Iterator[str]:
    """An address where the command serves a bundle in the native runner, in a process of its own."""
    command = [sys.executable, "-m", "exportable_cache", "serve", str(bundle), "--port", "0", "--name", "demo"]
    environment = {**os.environ, "EXPORTABLE_CACHE_RUNTIME": "native", "PYTHONPROFILEIMPORTTIME": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        try:
            while not (found := re.search(r"demo at (http://127\.0\.0\.1:\d+) ", lines[-1])):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            # Read on, because a full pipe would block the server.
            rest = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
            rest.start()
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            finally:
                process.kill()
        rest.join(20)
    assert process.returncode == 0 and "Traceback" not in "".join(lines), lines
    imported = {line.rpartition("|")[2].strip() for line in lines}
    assert "exportable_cache.decoding.native_completion" in imported
    assert imported.isdisjoint(("torch", "transformers", "numpy"))


def client_of(address: str, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def reply_to(
    address: str, path: str, body: Any, headers: dict[str, str] = JSON
) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("POST", path, body if isinstance(body, (bytes, str)) else json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, reply.headers, text


def post(address: str, path: str, body: Any, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """Status and document of an answer."""
    status, _, text = reply_to(address, path, body, headers)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def health(address: str) -> dict[str, Any]:
    """Return what a server reports: the requests in its queue ("waiting"), and those that ended ("answered")."""
    with urllib.request.urlopen(f"{address}/health", timeout=20) as reply:
        return json.load(reply)


def queued(address: str) -> int:
    """Return the number of requests that a server has taken and not begun to answer."""
    return health(address)["waiting"]


def begun_and_left(
    address: str,
    body: dict[str, Any],
    read: int,
    until: Callable[[], bool] = lambda: True,
    path: str = "/v1/completions",
) -> None:
    """Send a request, read some bytes of the response, and disconnect as soon as a condition holds."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        text = json.dumps(body)
        head = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
        head.append(f"Content-Length: {len(text)}")
        connection.sendall("\r\n".join([*head, "", text]).encode())
        if read:
            assert connection.recv(read)
        wait_until(until)
