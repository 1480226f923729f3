"""A small part of `make fuzz` for the server, with seeds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("openai", reason="the test extra is not installed")
pytest.importorskip("llguidance", reason="the serve extra is not installed")

from exportable_cache import ExportableCache, Session

from ..cli.serving import served
from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support.models import tiny_model
from . import fuzz_server
from .odd_requests import Sent, made


def test_odd_requests_are_answered_or_refused_by_a_sentence() -> None:
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=SIZE, eos_token_id=SIZE - 1)
    session = Session.from_model(model, ExportableCache.from_model(model, 256), tokenizer=byte_tokenizer(chat=True))
    with served(session, model_name="m") as address:
        port = int(address.rsplit(":", 1)[1])
        found = [(seed, *fuzz_server.outcome_of(port, made(seed))) for seed in range(120)]
    assert [one for one in found if one[1] not in (fuzz_server.ANSWERED, fuzz_server.REFUSED, fuzz_server.LEFT)] == []
    counts = [sum(one[1] == outcome for one in found) for outcome in (fuzz_server.ANSWERED, fuzz_server.REFUSED)]
    # Results of tools without a call are refused, so fewer are answered than refused.
    assert min(counts) > 10, counts


def test_a_seed_makes_one_request() -> None:
    assert [made(seed) for seed in range(30)] == [made(seed) for seed in range(30)]
    assert len({made(seed).data for seed in range(30)}) == 30


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (b"HTTP/1.1 500 X\r\n\r\n{}", fuzz_server.FAILED),
        (b"HTTP/1.1 503 X\r\n\r\n{}", fuzz_server.REFUSED),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\ndata: {}", fuzz_server.FAILED),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\ndata: [DONE]", fuzz_server.ANSWERED),
        (b"HTTP/1.1 400 X\r\n\r\nInput should be a valid string", fuzz_server.FOREIGN),
        (b"", fuzz_server.REFUSED),
    ],
)
def test_it_would_see_what_may_not_come(reply: bytes, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_server, "_reply", lambda port, sent: reply)
    assert fuzz_server.outcome_of(0, Sent(b""))[0] == outcome


def test_a_process_that_has_ended_is_a_crash_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fallen:
        port, is_alive, closed = 1, False, 0

        def close(self) -> float:
            Fallen.closed += 1
            return 0.0

    monkeypatch.setattr(fuzz_server, "Server", Fallen)
    found: list[str] = []
    fuzz_server.fuzz(2, 0, lambda number, sent, outcome, said, seconds: found.append(outcome), Fallen())
    assert found == [fuzz_server.CRASH] * 2 and Fallen.closed == 2
