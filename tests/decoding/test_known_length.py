"""Steps that run as they are know their length on the host, so that no model has to ask a device for it."""

from __future__ import annotations

import threading

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.cache import LayeredCache
from exportable_cache.cache.step import known_length, starting_at

from ..support.models import tiny_model, tokens


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list:
    """What models were told of the length."""
    answers: list = []
    original = LayeredCache.get_seq_length

    def get_seq_length(self: LayeredCache, layer_idx: int = 0):
        answers.append(original(self, layer_idx))
        return answers[-1]

    monkeypatch.setattr(LayeredCache, "get_seq_length", get_seq_length)
    return answers


def session_of(batch_size: int = 1) -> Session:
    model = tiny_model("llama")
    return Session.from_model(model, ExportableCache.from_model(model, 64, batch_size=batch_size), prefill_chunk=4)


@torch.no_grad()
def test_models_are_told_a_number(asked: list) -> None:
    session, ids = session_of(), tokens(9)
    session.prefill(ids[:, :6])
    session.decode(ids[:, 6])
    assert set(map(type, asked)) == {int} and list(dict.fromkeys(asked)) == [0, 4, 6]
    asked.clear()
    list(session.generate(ids, max_new_tokens=3))
    assert set(map(type, asked)) == {int}


@torch.no_grad()
def test_rows_that_differ_have_none(asked: list) -> None:
    session, ids = session_of(batch_size=2), tokens(9)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 3:] = 0
    session.prefill(ids[:, :6].expand(2, -1), attention_mask=mask)
    asked.clear()
    logits = session.decode(ids[0, [6, 3]])
    assert not [answer for answer in asked if isinstance(answer, int)]
    model = tiny_model("llama")
    for row, length in ((0, 6), (1, 3)):
        assert (logits[row] - model(ids[:, : length + 1]).logits[0, -1]).abs().max() <= 1e-4


def test_it_is_of_one_tensor_and_one_thread() -> None:
    start, found = torch.tensor([3]), []
    with starting_at(start, 3):
        assert known_length(start) == 3
        assert known_length(start + 0) is None
        with starting_at(start, None):
            assert known_length(start) is None
        thread = threading.Thread(target=lambda: found.append(known_length(start)))
        thread.start()
        thread.join()
    assert found == [None] and known_length(start) is None


def test_a_traced_step_serves_every_length() -> None:
    start = torch.tensor([3])
    step = torch.compile(lambda start: start + (known_length(start) is not None), fullgraph=True, backend="eager")
    with starting_at(start, 3):
        assert step(start).tolist() == [3]
