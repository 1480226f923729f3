"""`exportable-cache serve`: OpenAI's own client, and what is said of requests that are refused."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import Session, export, load

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

import openai

from exportable_cache.cli.server.app import ServerOptions, make_app
from exportable_cache.cli.server.run import run
from exportable_cache.decoding import Completer

MAX_CACHE_LEN = 128
QUESTION = "the code of amber is 4821. amber?"
JSON = {"Content-Type": "application/json"}

pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "demo"
    return export("demo", "fake", MAX_CACHE_LEN, folder, prefill_chunk=16, verify=False).path


@contextmanager
def served(session: Session, **options: Any) -> Iterator[str]:
    """An address where a session answers, as from the command, in a thread."""
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

    app = make_app(Completer(session), ServerOptions(**{"model_name": "demo", **options}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Noted)
        thread = threading.Thread(target=run, args=(app, "127.0.0.1", 0, started))
        thread.start()
        assert listens.wait(20)
        try:
            yield found[0]
        finally:
            while not servers:
                time.sleep(0.01)
            servers[0].should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    with served(load(bundle)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str):
    return client_of(address)


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


@pytest.fixture(scope="module")
def expected(bundle: Path) -> str:
    """The greedy answer to `QUESTION`, from the Python API."""
    return "".join(load(bundle).generate_text([{"role": "user", "content": QUESTION}]))


def test_a_chat_is_the_sessions_answer(client, expected: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == expected and choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in streamed if chunk.choices) == expected
    assert streamed[0].choices[0].delta.role == "assistant" and streamed[-2].choices[0].finish_reason == "stop"
    assert streamed[-1].usage.completion_tokens == answer.usage.completion_tokens
    parts = [{"type": "text", "text": QUESTION[:9]}, {"type": "text", "text": QUESTION[9:]}]
    in_parts = {**asked, "messages": [{"role": "user", "content": parts}]}
    assert client.chat.completions.create(**in_parts).choices[0].message.content == expected


def test_a_conversation_that_goes_on_is_fed_its_new_turn(client, expected: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": "amber?"}]
    second = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == held


def test_text_completions(client, bundle: Path) -> None:
    session = load(bundle)
    text = "".join(session.generate_text(QUESTION, max_new_tokens=5))
    asked = {"model": "demo", "prompt": QUESTION, "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**asked, logprobs=1)
    assert answer.choices[0].text == text and answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == text and logprobs.text_offset[0] == 0
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == text
    ids = session.text_tokenizer(QUESTION, add_special_tokens=True)["input_ids"]
    for form in (ids, [ids], [QUESTION]):
        assert client.completions.create(**{**asked, "prompt": form}).choices[0].text == text
    stopped = client.completions.create(**asked, stop=text[2:4])
    assert stopped.choices[0].text == text[:2] and stopped.choices[0].finish_reason == "stop"


def test_the_model_is_there_by_its_name(client) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="no model 'another/one'; this server has 'demo'"):
        client.models.retrieve("another/one")


def test_a_seed_draws_the_same(client) -> None:
    asked = {"model": "demo", "prompt": "the", "max_tokens": 20, "temperature": 1.5}
    texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    narrow = client.completions.create(**asked, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].text
    assert narrow == client.completions.create(**{**asked, "temperature": 0}).choices[0].text


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}


def test_an_answer_has_the_form_that_was_asked_for(client, expected: str) -> None:
    asked = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 1.5}
    form = schema_of({"enum": [4822, 9157]})
    for seed in range(4):
        (choice,) = client.chat.completions.create(**asked, response_format=form, seed=seed).choices
        assert choice.message.content in ("4822", "9157") and choice.finish_reason == "stop"
    text = {**asked, "temperature": 0, "response_format": {"type": "text"}}
    assert client.chat.completions.create(**text).choices[0].message.content == expected


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "demo", "prompt": "x"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {**CHAT, "model": "gpt"}, 404, "there is no model 'gpt'; this server has 'demo'"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages: "),
        ("chat/completions", {**CHAT, "n": 2}, 400, "n: "),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools: "),
        ("chat/completions", {**CHAT, "presence_penalty": 1}, 400, "presence_penalty: "),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type: "),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "without a schema; pass"),
        ("chat/completions", {**CHAT, "response_format": schema_of({"type": "x"})}, 400, "cannot be followed"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs was given without logprobs"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: "),
        ("chat/completions", {**CHAT, "frequency_penalty": 1}, 400, "frequency_penalty: "),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias: "),
        ("chat/completions", {**CHAT, "store": True}, 400, "store: "),
        ("chat/completions", {**CHAT, "messages": [{"role": "", "content": "x"}]}, 400, "messages.0.role: "),
        ("chat/completions", {**CHAT, "messages": [{"role": "x" * 65, "content": "x"}]}, 400, "messages.0.role: "),
        ("chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens: "),
        ("chat/completions", {**CHAT, "temperatur": 0}, 400, "temperatur: Extra inputs are not permitted"),
        ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature is -1"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages.0.content",
        ),
        ("completions", {**TEXT, "prompt": ""}, 400, "the prompt is empty"),
        ("completions", {**TEXT, "prompt": [10**9]}, 400, "token id 1000000000 is outside the vocabulary"),
        ("completions", {**TEXT, "prompt": ["x", "y"]}, 400, "got 2 prompts"),
        ("completions", {**TEXT, "prompt": [[5], [6]]}, 400, "got 2 prompts"),
        ("completions", {**TEXT, "prompt": "\ud800"}, 400, "no UTF-8"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "no UTF-8"),
        ("completions", {**TEXT, "max_tokens": 500}, 400, f"the cache holds {MAX_CACHE_LEN}; ask for at most"),
        ("completions", {**TEXT, "prompt": "the " * 500}, 400, f"but the cache holds {MAX_CACHE_LEN}; shorten it"),
        ("completions", {**TEXT, "top_p": 3}, 400, "top_p is 3"),
        ("completions", {**TEXT, "seed": 2**70}, 400, "seed is"),
        ("completions", {**TEXT, "logprobs": 21}, 400, "logprobs: "),
        ("completions", {**TEXT, "best_of": 2}, 400, "best_of: "),
        ("completions", {**TEXT, "echo": True}, 400, "echo: "),
        ("completions", {**TEXT, "suffix": "y"}, 400, "suffix: "),
        ("completions", b"{", 400, "the body is no JSON"),
        ("completions", b"\xff\xfe", 400, "the body is no JSON"),
        ("completions", b"[" * 100_000, 400, "error parsing the body"),
        ("completions", b" " * (9 * 2**20), 413, "Too Large"),
        ("embeddings", TEXT, 404, "Not Found"),
    ],
)
def test_what_is_refused_says_why(address: str, path: str, body: Any, status: int, message: str) -> None:
    found, document = post(address, f"/v1/{path}", body)
    said = document["error"]["message"]
    assert (found, message in said) == (status, True), (found, said)


def test_a_body_that_is_not_said_to_be_json_is_refused(address: str) -> None:
    """What a page of somebody else can send without being asked."""
    assert post(address, "/v1/completions", TEXT, {"Content-Type": "text/plain"})[0] == 400


def test_what_is_at_a_limit_is_taken(address: str) -> None:
    body = json.dumps({**TEXT, "max_tokens": 1, "logprobs": 20}).encode()
    status, document = post(address, "/v1/completions", body.ljust(8 * 2**20))
    assert status == 200 and len(document["choices"][0]["logprobs"]["top_logprobs"][0]) == 20
    asked = {**CHAT, "max_tokens": 5, "max_completion_tokens": 2, "temperature": 0}
    assert post(address, "/v1/chat/completions", asked)[1]["usage"]["completion_tokens"] == 2


def test_connections_beyond_those_that_are_held_are_refused(bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("exportable_cache.cli.server.run._MOST_CONNECTIONS", 2)
    with served(load(bundle)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20):
            assert post(address, "/v1/completions", {**TEXT, "max_tokens": 1})[0] == 503
        assert post(address, "/v1/completions", {**TEXT, "max_tokens": 1})[0] == 200


def test_it_still_answers_after_all_that(client, expected: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert answer.choices[0].message.content == expected


def test_the_page_and_the_cache(address: str, client) -> None:
    client.completions.create(model="demo", prompt="the code of amber", max_tokens=2, temperature=0)
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    connection.request("GET", "/")
    page = connection.getresponse().read().decode()
    # Nothing comes from elsewhere.
    assert "<title>exportable-cache</title>" in page and not re.search(r"(src|href)=|https?:", page)
    connection.request("GET", "/v1/cache")
    fill = json.loads(connection.getresponse().read())
    assert fill["max_length"] == MAX_CACHE_LEN
    assert [(layer["kind"], layer["slots"]) for layer in fill["layers"]][:2] == [("ring", 16), ("full", MAX_CACHE_LEN)]
    assert all(layer["filled"] == min(fill["length"], layer["slots"]) for layer in fill["layers"])
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read())["status"] == "ok"
    connection.close()


def test_a_key_and_a_full_queue(bundle: Path) -> None:
    session = load(bundle)
    step = session.decode
    goes_on = threading.Event()

    def waits(tokens: Any) -> Any:
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
        for thread in threads:
            thread.start()
            time.sleep(0.5)
        status, headers, text = reply_to(address, "/v1/completions", TEXT, {**JSON, "Authorization": "Bearer secret"})
        assert (status, json.loads(text)["error"]["type"], headers["Retry-After"]) == (503, "overloaded_error", "1")
        goes_on.set()
        for thread in threads:
            thread.join(20)
        assert len(answers) == 2 and answers[0] == answers[1]


def begun_and_left(address: str, body: dict[str, Any], read: int) -> None:
    """A request whose client reads some bytes of the answer, and goes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        text = json.dumps(body)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        )
        connection.sendall(f"{head}\r\n\r\n{text}".encode())
        if read:
            assert connection.recv(read)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_makes_place_for_the_next(bundle: Path, stream: bool) -> None:
    session = load(bundle)
    step, steps = session.decode, []

    def slow(tokens: Any) -> Any:
        steps.append(int(tokens))
        time.sleep(0.05)
        return step(tokens)

    session.decode = slow  # type: ignore[method-assign]
    with served(session) as address:
        begun_and_left(address, {**TEXT, "max_tokens": 100, "stream": stream, "seed": 1}, read=200 if stream else 0)
        answer = client_of(address).completions.create(**TEXT, max_tokens=3, temperature=0)
        assert answer.usage.completion_tokens == 3
    assert len(steps) < 60


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
def test_many_clients_with_faults_among_them(address: str, expected: str, requests: int, clients: int) -> None:
    assert load_of(address, requests, clients, expected) == []
