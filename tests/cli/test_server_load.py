"""Many clients at a time: each gets the text that it gets alone, whatever runs beside it and whoever leaves."""

from __future__ import annotations

import asyncio
import ctypes
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export, load

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")

from exportable_cache.cli.server.app import ServerOptions, make_app
from exportable_cache.cli.server.engine import Engine
from exportable_cache.decoding import BatchCompleter, Completer, CompletionOptions, ContinuousBatch
from exportable_cache.decoding.context import PROTECTED
from exportable_cache.demo import demo_path
from exportable_cache.models.tokenizers.text import LONG_TEXT
from exportable_cache.session.opening import ModelOptions, open_model, open_rows

from ..support.streams import requests, streamed
from ..support.waiting import wait_until
from .serving import CHAT, MAX_CACHE_LEN, client_of, health, served

CLIENTS = 16


def under_load(address: str, kinds: list[dict[str, Any]], until: float, most: int) -> tuple[int, list[Any]]:
    """Let clients send requests at a time, some of which leave, and return the number answered and the wrong ones."""
    expected = [streamed(address, body) for body in kinds]
    assert len(set(expected)) > len(kinds) // 2
    wrong: list[Any] = []
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        chooses = random.Random(number)
        try:
            for _ in range(most):
                if time.monotonic() > until:
                    return
                kind = chooses.randrange(len(kinds))
                leaves = chooses.choice([None, None, None, 1, 2])
                found = streamed(address, kinds[kind], leaves)
                answered[number] += 1
                if found is not None and found != expected[kind]:
                    wrong.append((kinds[kind], expected[kind], found))
        except BaseException as error:  # for the main thread
            wrong.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    wait_until(lambda: health(address)["waiting"] == 0)
    return sum(answered), wrong


@pytest.fixture(scope="module")
def rows_bundle(tmp_path_factory: pytest.TempPathFactory, fake_backend: None) -> Path:
    """The demo model with three rows."""
    folder = tmp_path_factory.mktemp("bundles") / "rows"
    return export("demo", "fake", MAX_CACHE_LEN, folder, batch_size=3, prefill_chunk=16, verify=False).path


@pytest.mark.parametrize(
    "target", ["fake", *(pytest.param(name, marks=pytest.mark.full) for name in ("pt2", "executorch"))]
)
def test_a_bundle_of_several_rows_answers_all_at_once(rows_bundle: Path, tmp_path: Path, target: str) -> None:
    """Its runtime does not give out its cache, as that of ExecuTorch."""
    if target != "fake":
        rows_bundle = export(
            "demo", target, MAX_CACHE_LEN, tmp_path / "rows", batch_size=3, prefill_chunk=16, verify=False
        ).path
    batch = ContinuousBatch(None, load(rows_bundle))
    with served(BatchCompleter(batch)) as address:
        count, wrong = under_load(address, requests(5, ["demo"], words=9, seed=1), time.monotonic() + 600, 1)
    assert (count, wrong) == (CLIENTS, [])
    assert batch.active == batch.waiting == 0


def test_as_many_requests_begin_as_there_are_rows(rows_bundle: Path) -> None:
    """No step runs before the third one has begun, which a queue of one would never allow."""
    completer = BatchCompleter(ContinuousBatch(None, load(rows_bundle)))
    begun, complete, step = threading.Semaphore(0), completer.complete, completer.batch.step
    counted: list[Any] = []

    def begin(*given: Any) -> Any:
        begun.release()
        return complete(*given)

    def after_all() -> Any:
        while len(counted) < 3:
            assert begun.acquire(timeout=60)
            counted.append(1)
        return step()

    completer.complete, completer.batch.step = begin, after_all  # type: ignore[method-assign]
    body, found = requests(1, ["demo"], words=9)[0] | {"max_tokens": 2}, []
    with served(completer) as address:
        threads = [threading.Thread(target=lambda: found.append(streamed(address, body))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3 and len(set(found)) == 1 and found[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_server_shifts_after_the_system_prompt(server_bundle: Path, rows_bundle: Path, rows: int) -> None:
    """A conversation that outgrows the cache is answered to its end; the usage tells what was dropped."""
    completer: Any = Completer(load(server_bundle))
    if rows > 1:
        completer = BatchCompleter(ContinuousBatch(None, load(rows_bundle)))
    completer.use("shift")
    system = {"role": "system", "content": "the code of paper is 77."}
    messages, dropped, kept = [system], list[int](), list[int | None]()
    complete = completer.complete

    def noted(ids: Any, options: Any, *rest: Any) -> Any:
        kept.append(options.protected)
        return complete(ids, options, *rest)

    completer.complete = noted
    with served(completer) as address:
        client = client_of(address)
        for _ in range(8):
            messages.append({"role": "user", "content": "the code of amber is 4821. " * 8})
            asked = {"model": "demo", "messages": messages, "temperature": 0, "max_completion_tokens": 3}
            found = client.chat.completions.create(**asked)
            messages.append({"role": "assistant", "content": found.choices[0].message.content})
            dropped.append(getattr(found.usage.prompt_tokens_details, "dropped_tokens", 0))
            assert found.usage.completion_tokens >= 1 and completer.length <= MAX_CACHE_LEN
        client.completions.create(model="demo", prompt="amber", max_tokens=1)
    assert dropped[0] == 0 and dropped == sorted(dropped) and dropped[-1] > MAX_CACHE_LEN // 3
    assert kept.pop() == PROTECTED
    begins = completer.encode([system, {"role": "user", "content": "x"}])
    assert len(set(kept)) == 1 and kept[0] is not None and 8 < kept[0] < len(begins)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_the_memory_of_a_long_prompt_is_given_back(server_bundle: Path) -> None:
    engine = Engine(Completer(load(server_bundle)), 4)

    def encode() -> bytes:
        # Freed objects lie below the last one, so the heap cannot shrink. Each is too large for the heap of Python.
        return [bytes(600) for _ in range(200_000)][-1]

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = pages()
    kept = asyncio.run(engine.prepare(encode, characters=LONG_TEXT - 1))
    grown = pages() - before
    asyncio.run(engine.prepare(len, kept, characters=LONG_TEXT))
    engine.close()
    assert grown * 4096 > 80e6 and pages() - before < grown // 4


def test_a_client_that_does_not_read_holds_up_no_other_one(server_bundle: Path) -> None:
    completer = Completer(load(server_bundle))
    engine = Engine(completer, 4)

    def run() -> Any:
        return engine.run(lambda _: completer.complete([5, 6, 7], CompletionOptions(max_new_tokens=5)))

    async def both() -> tuple[list[Any], list[Any]]:
        unread = run()
        first = await anext(unread)
        other = await asyncio.wait_for(taken(run()), 30)
        return [first, *await taken(unread)], other

    async def taken(pieces: Any) -> list[Any]:
        return [one async for one in pieces]

    unread, other = asyncio.run(both())
    engine.close()
    assert [piece.token for _, piece in unread] == [piece.token for _, piece in other]
    # Each piece comes with the state at that piece, though the completion had ended before it was taken.
    assert [completion.new_tokens for completion, _ in unread] == list(range(1, len(unread) + 1))
    assert [completion.finish_reason is None for completion, _ in unread] == [True] * (len(unread) - 1) + [False]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_client_that_leaves_does_not_wait_for_its_prompts_tokens(server_bundle: Path, path: str) -> None:
    completer, is_released, sent = Completer(load(server_bundle)), threading.Event(), []
    completer.encode = lambda *_, **__: [5] * is_released.wait(60)  # type: ignore[method-assign]
    app = make_app(completer, ServerOptions("demo"))
    received = iter([{"type": "http.request", "body": json.dumps(CHAT).encode(), "more_body": False}])
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}

    async def receive() -> Any:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    async def ends() -> None:
        try:
            await asyncio.wait_for(app(scope, receive, send), 30)
            assert not is_released.is_set()
        finally:
            is_released.set()

    asyncio.run(ends())
    app.state.engine.close()
    assert sent[0] == 499


@pytest.mark.full
def test_a_live_model_answers_all_at_once() -> None:
    """For twenty seconds, with a prefix tree that evicts all the time."""
    options = ModelOptions(max_cache_len=MAX_CACHE_LEN, device="cpu", compile=False)
    session, loaded = open_model(str(demo_path()), options)
    batch = ContinuousBatch(session, open_rows(session, loaded.model, options, rows=5), prefix_bytes=2**20)
    with served(BatchCompleter(batch)) as address:
        _, wrong = under_load(address, requests(24, ["demo"], words=9), time.monotonic() + 20, 10**6)
    assert wrong == [] and batch.active == batch.waiting == 0
    assert 0 < batch.prefixes.nbytes <= 2**20
