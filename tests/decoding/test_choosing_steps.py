"""Choosing inside the graph gives the tokens that choosing outside of it gives, with one graph for all settings."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Sampler, Sampling
from exportable_cache.errors import InputError

from ..support.compiling import compiling_with
from ..support.models import hybrid_model, tiny_model, tokens

SETTINGS = [
    {},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 3},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model()


@pytest.fixture(scope="module")
def small() -> Any:
    """To be traced: what comes before the choice is the same to it."""
    return tiny_model("llama", num_hidden_layers=1)


@pytest.fixture
def traced_only() -> Iterator[None]:
    """Graphs run as they are traced: which there are is the same."""
    counters.clear()
    with compiling_with("eager"):
        yield


def session_of(model: Any, compile: bool, rows: int = 1, steps: int = 1) -> Session:
    cache = ExportableCache.from_model(model, 48, rows, rollback_slots=steps - 1)
    return Session.from_model(model, cache, compile=compile, prefill_chunk=16, buckets=False, steps_per_launch=steps)


def outside(session: Session, prompt: torch.Tensor, count: int, **options: Any) -> list[list[int]]:
    """The same loop by hand, choosing from logits."""
    chooser = Sampler(Sampling(**options), prompt, session.vocab_size)
    chosen = [chooser.choose(session.prefill(prompt))]
    while len(chosen) < count:
        chosen.append(chooser.choose(session.decode(chosen[-1])))
    return [step.tolist() for step in chosen]


@pytest.mark.parametrize("options", SETTINGS)
def test_rows_of_a_batch_get_the_same_tokens_either_way(model: Any, options: dict) -> None:
    model.generation_config.eos_token_id = None
    prompt = tokens(9, batch_size=2)
    expected = outside(session_of(model, False, 2), prompt, 20, **options)
    # Single eager steps choose from logits.
    found = [step.tolist() for step in session_of(model, False, 2, steps=3).generate(prompt, 20, **options)]
    assert found == expected


def test_one_compiled_graph_serves_all_settings(small: Any, traced_only) -> None:
    """Warm-up compiles every graph except those of the penalty, and leaves an empty cache."""
    small.generation_config.eos_token_id = None
    session, prompt, told = session_of(small, True), tokens(9), []
    session.warm_up(lambda *report: told.append(report))
    assert counters["stats"]["unique_graphs"] == 4  # prefill; decode to logits, to the likeliest token, to a drawn one
    assert told == [("warming up decode", 0, 2), ("warming up prefill", 1, 2)]
    assert not any(tensor.any() for tensor in session.runner.state.values())
    plain = [options for options in SETTINGS if "repetition_penalty" not in options]
    penalised = [options for options in SETTINGS if "repetition_penalty" in options]
    # Decode with the penalty: greedy or drawn.
    for settings, graphs in ((plain, 4), (penalised, 6)):
        for options in settings:
            expected = outside(session_of(small, False), prompt, 12, **options)
            session.reset()
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert [[token] for token in session.generate(prompt, 12, **options)] == expected, options
        assert counters["stats"]["unique_graphs"] == graphs
    with pytest.raises(InputError, match="warm_up overwrites the cache"):
        session.warm_up()
