"""Compiled methods of models whose code asks for the length of a step."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.graph_cache import OutdatedGraph
from exportable_cache.errors import UnsupportedModelError

from ..support.models import among, tiny_model, tokens
from ..support.oracle import difference, reference_logits

LEAST = 5


class LengthAsked(nn.Module):
    """A norm with code of its own for steps of fewer than `least` tokens, which computes the same."""

    def __init__(self, norm: nn.Module, least: int) -> None:
        super().__init__()
        self.norm, self.least = norm, least

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_states) if hidden_states.shape[1] >= self.least else self.norm(hidden_states + 0)


@pytest.fixture(autouse=True)
def without_generated_code() -> Iterator[None]:
    backend = torch.compiler.get_default_backend()
    torch._dynamo.reset()
    torch.compiler.set_default_backend("eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch.compiler.set_default_backend(backend)
    torch._dynamo.reset()


def compiled_session(least: int, prefill_chunk: int = 16) -> Session:
    model = tiny_model("llama", num_hidden_layers=1)
    model.model.norm = LengthAsked(model.model.norm, least)
    cache = ExportableCache.from_model(model, 64)
    return Session.from_model(model, cache, compile=True, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("prompts", [(3, 11), pytest.param((11, 3), marks=pytest.mark.full)])
def test_prompts_too_short_for_the_graph_of_longer_ones_go_token_by_token(prompts: tuple[int, ...]) -> None:
    session, ids = compiled_session(LEAST), tokens(24)
    model = tiny_model("llama", num_hidden_layers=1)
    for prompt in prompts:
        session.reset()
        assert difference(session.prefill, reference_logits(model, ids, prompt), ids, prompt) <= 1e-4
    assert session.runner.methods["prefill"].min_length == LEAST
    assert session.stepper.chunk_sizes(LEAST - 1) == [1] * (LEAST - 1)


@pytest.mark.full
def test_warm_up_compiles_the_raised_method() -> None:
    session = compiled_session(LEAST)
    session.warm_up()
    compiled = len(session.runner._calls)
    session.prefill(tokens(LEAST))
    session.reset()
    session.prefill(tokens(LEAST - 1))
    assert len(session.runner._calls) == compiled


@pytest.mark.parametrize("family", among(["llama", "mamba"], fast=["llama"]))
def test_the_graph_of_a_threads_first_step_serves_its_second(family: str) -> None:
    """What a step keeps for its thread is there before the first one, or its guards fail afterwards."""
    model = tiny_model(family, num_hidden_layers=1)
    ids, found = tokens(8), []

    def steps() -> None:
        session = Session.from_model(model, ExportableCache.from_model(model, 64), compile=True, prefill_chunk=16)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                session.reset()
                logits = session.prefill(ids[:, :5])
                for token in ids[0, 5:]:
                    logits = session.decode(token[None])
        found.append(logits)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert len(found) == 1
    torch.testing.assert_close(found[0], reference_logits(model, ids, 5)[:, -1], atol=1e-4, rtol=0)


def test_prompts_that_would_mostly_go_token_by_token_are_refused() -> None:
    session = compiled_session(40, prefill_chunk=64)
    with pytest.raises(UnsupportedModelError, match="prefill cannot be compiled into one graph"):
        session.prefill(tokens(50))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"temperature": 0.9}, 2),
        pytest.param({"temperature": 0.9, "repetition_penalty": 1.3}, 1, marks=pytest.mark.full),
        pytest.param({"repetition_penalty": 1.3}, 2, marks=pytest.mark.full),
        pytest.param({}, 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_choice_behind_the_step_is_the_one_inside(options: dict[str, float], steps: int, monkeypatch) -> None:
    """And graphs that do not fit any more are compiled again, those of choices, too."""
    model, ids = tiny_model("llama", num_hidden_layers=1), tokens(5)
    sessions = [
        Session.from_model(model, ExportableCache.from_model(model, 64), compile=compiled, **more)
        for compiled, more in ((False, {}), ("wait", {"prefill_chunk": 1, "steps_per_launch": steps}))
    ]
    runner = sessions[1].runner
    monkeypatch.setattr(runner.compiler, "chooses_separately", lambda penalised: True)
    found = [list(session.generate(ids, 9, seed=3, **options)) for session in sessions]
    assert found[0] == found[1]
    calls = set(runner._calls)
    assert {key.step.method for key in calls} == ({"decode", "choice"} if options else {"decode"})

    def outdated(*_: torch.Tensor) -> None:
        raise OutdatedGraph

    runner._calls.update(dict.fromkeys(calls, outdated))
    sessions[1].reset()
    assert list(sessions[1].generate(ids, 9, seed=3, **options)) == found[0]
    assert set(runner._calls) == calls and outdated not in runner._calls.values()
