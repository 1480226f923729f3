"""Graphs compiled by another process while steps go on."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.skeleton import from_skeleton, skeleton
from exportable_cache.errors import InputError

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens

CAPACITY = 64


@pytest.fixture(autouse=True)
def generated_code() -> Iterator[None]:
    with compiling_with("inductor"):
        yield


def model_of(**options):
    model = tiny_model("llama", num_hidden_layers=2, **options)
    model.generation_config.eos_token_id = None
    return model


def session_of(model, compile: bool | str = "background", **options) -> Session:
    return Session.from_model(
        model, ExportableCache.from_model(model, CAPACITY), compile=compile, prefill_chunk=16, buckets=(32,), **options
    )


def wait(session: Session, seconds: float = 1800) -> None:
    end = time.monotonic() + seconds
    while session.pending_graphs and time.monotonic() < end:
        time.sleep(0.05)
    assert session.pending_graphs == 0


def test_tokens_are_the_same_before_and_after_the_graphs_are_there() -> None:
    """Greedy and drawn: an answer that begins as it is goes on in a graph, with the same random numbers."""
    model, prompt = model_of(), tokens(5)
    settings = {"temperature": 0.9, "seed": 7}
    expected = list(session_of(model, False).generate(prompt, 40, **settings))
    session = session_of(model)
    answer = session.generate(prompt, 40, **settings)
    found = [next(answer) for _ in range(9)]
    assert session.pending_graphs == 2 and not session.runner._calls
    wait(session)
    found += answer
    assert found == expected
    assert [key[0] for key in session.runner._calls] == ["decode"]
    logits = session_of(model, False).prefill(prompt)
    session.reset()
    torch.testing.assert_close(session.prefill(prompt), logits, atol=1e-4, rtol=0)
    assert sorted(key[0] for key in session.runner._calls) == ["decode", "prefill"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.reset()
        session.warm_up()
    assert len(session.runner._calls) == 4  # prefill; decode to logits, greedily and drawn


def test_a_process_that_dies_is_one_warning_and_steps_go_on() -> None:
    model, prompt = model_of(), tokens(5)
    expected = list(session_of(model, False).generate(prompt, 12))
    session = session_of(model)
    answer = session.generate(prompt, 12)
    found = [next(answer)]
    session.runner.background._process.kill()
    wait_until(lambda: session.runner.background._mail.over)
    with pytest.warns(RuntimeWarning, match="steps go on without compiled graphs: the compiling process") as warned:
        found += answer
    assert found == expected and len(warned) == 1


def test_closing_ends_the_process_and_takes_its_folder_along() -> None:
    model = model_of()
    session = session_of(model)
    session.prefill(tokens(3))
    process, folder = session.runner.background._process, Path(session.runner.graph_cache.folder)
    assert process.poll() is None and folder.is_dir()
    session.close()
    assert process.poll() is not None
    del session
    gc.collect()
    assert not folder.exists()


def test_what_cannot_be_compiled_elsewhere_is_refused(monkeypatch) -> None:
    model = model_of()
    with pytest.raises(InputError, match="mode is 'max-autotune'.*pass compile=True"):
        session_of(model, mode="max-autotune")
    with pytest.raises(InputError, match="compile is 'later'; it must be True, False or 'background'"):
        session_of(model, "later")
    model.model.norm.hook = lambda: None
    with pytest.raises(InputError, match="cannot be pickled .*pass compile=True"):
        session_of(model)
    with compiling_with("eager"), pytest.raises(InputError, match="backend is 'eager'"):
        session_of(model_of())


def test_a_skeleton_has_no_large_values_and_keeps_what_is_tied() -> None:
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=4096)
    written = skeleton(model)
    assert len(written) < model.lm_head.weight.nbytes / 2
    other = from_skeleton(written)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype), name
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, other.model.rotary_emb.inv_freq)


def wait_until(condition, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()
