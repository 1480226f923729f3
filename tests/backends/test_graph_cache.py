"""Compiled graphs that a later session takes from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from exportable_cache import ExportableCache, Session
from exportable_cache.backends import graph_cache
from exportable_cache.errors import InputError

from ..support.compiling import compiling_with
from ..support.models import among, tiny_model, tokens
from ..support.oracle import difference, reference_logits

CAPACITY = 32


def session_of(model, folder: Path, **options) -> Session:
    torch._dynamo.reset()
    counters.clear()
    return Session.from_model(
        model,
        ExportableCache.from_model(model, CAPACITY),
        compile=True,
        prefill_chunk=16,
        graph_cache=folder,
        **options,
    )


def worst(session: Session, model) -> float:
    """Largest |logit difference| to the eager model: prompts around the window and a chunk longer than
    `prefill_chunk`.
    """
    ids, found = tokens(CAPACITY), 0.0
    for prompt in (1, 3, 8, 19):
        session.reset()

        def step(piece: torch.Tensor, session: Session = session) -> torch.Tensor:
            return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

        found = max(found, difference(step, reference_logits(model, ids, prompt), ids, prompt))
    return found


def counts(session: Session) -> tuple[int, int]:
    return session.runner.graph_cache.loaded, session.runner.graph_cache.compiled


@pytest.fixture(scope="module", autouse=True)
def generated_code() -> Iterator[None]:
    with compiling_with("inductor"):
        yield


def ring_model(scale: float = 1.0):
    model = tiny_model("mistral", num_hidden_layers=1)
    model.model.layers[0].self_attn.scaling *= scale
    return model


@pytest.fixture(scope="module")
def model():
    return ring_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    session = session_of(model, folder, buckets=False)
    assert worst(session, model) <= 1e-4
    assert counts(session) == (0, 2) and len(list(folder.glob("*.graph"))) == 2
    return folder


def test_a_later_session_traces_and_compiles_nothing(model, folder) -> None:
    session = session_of(model, folder, buckets=False)
    assert worst(session, model) <= 1e-4
    assert counts(session) == (2, 0)
    assert not counters["frames"] and not counters["stats"]["unique_graphs"]


def test_graphs_hold_no_weights(model, folder) -> None:
    torch.manual_seed(1)
    other = ring_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    session = session_of(other, folder, buckets=False)
    assert worst(session, other) <= 1e-4 and counts(session) == (2, 0)
    assert reference_logits(other, tokens(4), 4).sub(reference_logits(model, tokens(4), 4)).abs().max() > 1e-2


def test_what_the_file_name_does_not_know_is_guarded(folder) -> None:
    other = ring_model(scale=4)
    session = session_of(other, folder, buckets=False)
    session.prefill(tokens(3))
    assert counts(session) == (0, 1)
    # Back to the graphs of the other tests.
    session_of(ring_model(), folder, buckets=False).prefill(tokens(3))


@pytest.mark.parametrize(
    "change", among(["source", "file", "threads", "layout", "hook"], fast=["source", "file", "hook"])
)
def test_graphs_of_something_else_are_compiled_again(change: str, model, folder, monkeypatch) -> None:
    options = {"buckets": False}
    if change == "source":
        lines = graph_cache._lines
        monkeypatch.setattr(
            graph_cache, "_lines", lambda module: [line.replace("return", "return ") for line in lines(module)]
        )
    elif change == "file":
        for path in folder.glob("*.graph"):
            path.write_bytes(path.read_bytes()[:1000])
    elif change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    elif change == "hook":
        hook = model.model.norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        options = {"buckets": [4]}
    try:
        session = session_of(model, folder, **options)
        ids = tokens(3)
        torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 3)[:, -1], atol=1e-4, rtol=0)
    finally:
        if change == "hook":
            hook.remove()
    assert counts(session) == (0, 1)


def test_the_choice_of_tokens_is_kept_too(model, folder) -> None:
    expected = list(session_of(model, folder, buckets=False).generate(tokens(5), 6, temperature=0.7, seed=1))
    session = session_of(model, folder, buckets=False)
    assert list(session.generate(tokens(5), 6, temperature=0.7, seed=1)) == expected
    assert counts(session) == (2, 0)


def test_nothing_is_kept_of_a_session_that_compiles_nothing(model, tmp_path) -> None:
    with pytest.raises(InputError, match="graph_cache is .* without compile=True"):
        Session.from_model(model, ExportableCache.from_model(model, CAPACITY), graph_cache=tmp_path)


def test_a_graph_that_cannot_be_written_runs_all_the_same(model, tmp_path, monkeypatch, caplog) -> None:
    """And is not compiled twice."""
    monkeypatch.setattr(
        graph_cache, "atomic_path", lambda path: (_ for _ in ()).throw(OSError("no space left on device"))
    )
    session = session_of(model, tmp_path, buckets=False)
    assert worst(session, model) <= 1e-4
    assert counts(session) == (0, 2) and not list(tmp_path.iterdir()) and "no space left" in caplog.text
    assert counters["stats"]["unique_graphs"] == 2
