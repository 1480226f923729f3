"""`exportable-cache serve` with many clients: who waits, who is refused, who goes away amid an answer."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import load
from exportable_cache.decoding import Completer
from exportable_cache.models.tokenizers.text import LONG_TEXT

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

import openai

from ..support.waiting import wait_until
from .serving import JSON, QUESTION, TEXT, begun_and_left, client_of, health, post, queued, reply_to, served

pytestmark = pytest.mark.usefixtures("fake_backend")


def test_connections_beyond_those_that_are_held_are_refused(server_bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("exportable_cache.cli.server.app._MOST_CONNECTIONS", 2)
    with served(load(server_bundle)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20):
            assert post(address, "/v1/completions", {**TEXT, "max_tokens": 1})[0] == 503
        assert post(address, "/v1/completions", {**TEXT, "max_tokens": 1})[0] == 200


def test_a_key_and_a_full_queue(server_bundle: Path) -> None:
    session = load(server_bundle)
    step = session.decode
    begun, goes_on = threading.Event(), threading.Event()

    def waits(tokens: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return step(tokens)

    session.decode = waits  # type: ignore[method-assign]
    with served(session, api_key="secret", most_waiting=1) as address:
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            client_of(address, "other").models.list()
        assert post(address, "/v1/completions", TEXT)[0] == 401
        client = client_of(address, "secret")
        assert client.models.list().data[0].id == "demo"
        answers: list[Any] = []

        def ask() -> None:
            answers.append(client.completions.create(**TEXT, max_tokens=3, temperature=0).choices[0].text)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert begun.wait(20)
        threads[1].start()
        wait_until(lambda: queued(address) == 1)
        status, headers, text = reply_to(address, "/v1/completions", TEXT, {**JSON, "Authorization": "Bearer secret"})
        assert (status, json.loads(text)["error"]["type"], headers["Retry-After"]) == (503, "overloaded_error", "1")
        goes_on.set()
        for thread in threads:
            thread.join(20)
        assert len(answers) == 2 and answers[0] == answers[1]


def test_a_long_text_delays_no_short_one(server_bundle: Path) -> None:
    completer = Completer(load(server_bundle))
    encode, begins, goes_on, found = completer.encode, threading.Event(), threading.Event(), []

    def waits(prompt: Any, *given: Any, **options: Any) -> list[int]:
        if len(prompt) >= LONG_TEXT:
            begins.set()
            assert goes_on.wait(60)
        return encode(prompt, *given, **options)

    completer.encode = waits  # type: ignore[method-assign]
    with served(completer) as address:
        body = {"prompt": "x" * LONG_TEXT}
        long = threading.Thread(target=lambda: found.append(post(address, "/tokenize", body)[1]["count"]))
        long.start()
        assert begins.wait(60)
        try:
            assert client_of(address).completions.create(**TEXT, max_tokens=3, temperature=0).choices
            chat = {**TEXT, "messages": [{"role": "user", "content": QUESTION}]}
            del chat["prompt"]
            assert client_of(address).chat.completions.create(**chat, max_tokens=3).choices and not found
        finally:
            goes_on.set()
            long.join(60)
    assert found == [LONG_TEXT]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_makes_place_for_the_next(server_bundle: Path, stream: bool) -> None:
    session = load(server_bundle)
    step, steps, noticed = session.decode, [], []

    def waits(tokens: Any) -> Any:
        steps.append(int(tokens))
        if len(steps) == 5:
            wait_until(lambda: health(address)["answered"] == 1, 20)
            noticed.append(len(steps))
        return step(tokens)

    session.decode = waits  # type: ignore[method-assign]
    with served(session) as address:
        request = {**TEXT, "max_tokens": 100, "stream": stream, "seed": 1}
        begun_and_left(address, request, read=200 if stream else 0, until=lambda: len(steps) == 5)
        answer = client_of(address).completions.create(**TEXT, max_tokens=3, temperature=0)
        assert answer.usage.completion_tokens == 3
    # The running step is finished, and no other one begun.
    assert noticed == [5] and len(steps) <= 5 + 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_during_its_prompt_ends_it_after_a_chunk(server_bundle: Path, stream: bool) -> None:
    session = load(server_bundle)
    step, chunks, noticed = session.runner.run, [], []

    def waits(method: str, *inputs: Any) -> Any:
        if method == "prefill":
            chunks.append(inputs[0].shape[1])
            if len(chunks) in (2, 4):
                ended = len(chunks) - 1  # one request before each of the two that are left
                wait_until(lambda: health(address)["answered"] == ended, 20)
                noticed.append(len(chunks))
        return step(method, *inputs)

    session.runner.run = waits  # type: ignore[method-assign]
    with served(session) as address:
        # 7 chunks of 16 tokens; the client disconnects during the second.
        prompt = list(range(1, 113))
        request = {"model": "demo", "prompt": prompt, "stream": stream}
        begun_and_left(address, request, read=0, until=lambda: len(chunks) == 2)
        answer = client_of(address).completions.create(**TEXT, max_tokens=1, temperature=0)
        # No chunk begins after the server noticed; the single token of TEXT is decoded.
        assert answer.usage.completion_tokens == 1 and noticed == [2] and len(chunks) == 2
        # Tokens that were fed are reused for a client that repeats the prompt.
        begun_and_left(address, request, read=0, until=lambda: len(chunks) == 4)
        again = client_of(address).completions.create(model="demo", prompt=prompt, max_tokens=1, temperature=0)
        assert again.usage.prompt_tokens_details.cached_tokens == 32 and noticed == [2, 4]
        assert (
            again.choices[0].text
            == client_of(address)
            .completions.create(model="demo", prompt=prompt, max_tokens=1, temperature=0)
            .choices[0]
            .text
        )


def load_of(address: str, requests: int, clients: int, expected: str) -> list[str]:
    """Requests of many clients at once, every fourth with a fault; whatever was not as it should be."""
    wrong: list[str] = []
    numbers = iter(range(requests))
    lock = threading.Lock()

    def work() -> None:
        client = client_of(address)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                kind = number % 8
                if kind == 3:
                    begun_and_left(address, {**TEXT, "max_tokens": 60, "stream": True}, read=50)
                elif kind == 7:
                    status, _ = post(address, "/v1/completions", {**TEXT, "max_tokens": -number})
                    if status != 400:
                        wrong.append(f"{number}: {status}")
                else:
                    messages = [{"role": "user", "content": QUESTION}]
                    asked = {"model": "demo", "messages": messages, "temperature": 0}
                    if kind % 2:
                        chunks = client.chat.completions.create(**asked, stream=True)
                        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                    else:
                        text = client.chat.completions.create(**asked).choices[0].message.content
                    if text != expected:
                        wrong.append(f"{number}: {text!r}")
            except Exception as error:
                wrong.append(f"{number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return wrong


@pytest.mark.parametrize(("requests", "clients"), [(32, 8), pytest.param(200, 16, marks=pytest.mark.full)])
def test_many_clients_with_faults_among_them(
    server_address: str, greedy_answer: str, requests: int, clients: int
) -> None:
    assert load_of(server_address, requests, clients, greedy_answer) == []
