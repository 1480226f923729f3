"""Short forms of `make soak`, and what they would see."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exportable_cache import Session
from exportable_cache.cache.policies import RingPolicy
from exportable_cache.decoding import Completer

from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support.models import tiny_model
from . import soak, soak_server


def test_a_ring_of_some_thousand_steps() -> None:
    assert soak.ring_drift(3000) == 0


def test_it_would_see_a_ring_that_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RingPolicy.next_slot
    monkeypatch.setattr(RingPolicy, "next_slot", lambda self, length: real(self, length + (length > 150).long()))
    assert soak.ring_drift(160) > 0


def test_it_would_see_positions_that_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RingPolicy.positions
    monkeypatch.setattr(RingPolicy, "positions", lambda self, length: real(self, length) + (length > 150).long())
    assert soak.ring_drift(160) > 0


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("targets", [["eager"], pytest.param(["eager", "pt2"], marks=pytest.mark.full)])
def test_sessions_in_threads(targets: list[str]) -> None:
    threads = torch.get_num_threads()
    try:
        found = soak.soak(1, sessions=4, threads=2, targets=targets)
    finally:
        torch.set_num_threads(threads)
    assert found.errors == []
    assert found.wrong == 0
    assert found.answers > 5
    assert found.memory


def test_growth_is_that_of_a_line() -> None:
    found = soak.Soaked(memory=[(float(second), 100 + second / 30) for second in range(100)])
    assert found.growth == pytest.approx(2.0)


@pytest.mark.parametrize("known", [8, 1000])
def test_clients_of_a_server(known: int) -> None:
    """After some requests the server continues other prompts; these responses are counted as wrong."""
    pytest.importorskip("openai", reason="the test extra is not installed")
    from ..cli.serving import served

    model = tiny_model("llama", vocab_size=SIZE, eos_token_id=SIZE - 1)
    completer: Any = Completer(Session.from_model(model, max_cache_len=256, tokenizer=byte_tokenizer(chat=True)))
    complete, asked = completer.complete, list[int]()

    def changed(ids: list[int], *given: Any) -> Any:
        asked.append(len(ids))
        return complete(ids if len(asked) <= known else [7] * 9, *given)

    completer.complete = changed
    with served(completer, model_name="m") as address:
        server: Any = SimpleNamespace(port=int(address.rpartition(":")[2]), memory=1)
        found, odd = soak_server.soak(0.5, server, ["m"], pause=0.02)
    assert found.answers > 8 and odd.total() > 0 and found.memory
    assert (found.wrong > 0) == (known == 8) and found.errors == []
