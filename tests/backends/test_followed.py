"""Steps of one answer that go straight to their recording, and what makes them ask the model first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import layered, replay
from exportable_cache.backends.live.followed import FollowedStep, graph_ran
from exportable_cache.backends.live.layer_tensors import OwnTensors
from exportable_cache.backends.live.ops import linear
from exportable_cache.backends.live.replay import RecordedSteps
from exportable_cache.decoding import Completer, CompletionOptions, ContinuousBatch, beam_search
from exportable_cache.generation.answer import steps_of
from exportable_cache.program import lengths

from ..support.compiling import compiling_with
from ..support.letters import letter_tokenizer
from ..support.models import tiny_model, tokens

pytestmark = pytest.mark.skipif(not linear.OPERATORS.is_wanted(), reason="there is no C++ compiler")

SIZE = 48
#: Steps of an answer that ask the model: one that shows what moves, one that is recorded.
BEFORE = 2
NEW = 36
#: Of 8 slots, which a prompt of 4 tokens and 36 others fill.
BUCKETS = 5


class Step:
    """A step by a graph of few rows, as TorchDynamo would call it, and how often it was asked for."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.calls = weight, 0
        self.graph = RecordedSteps(OwnTensors(()))
        self.step = FollowedStep(self.call)

    def call(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.of(self.run(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        inputs = (x, self.weight)
        outputs = self.graph(lambda given: (linear.plain_linear(*given, None),), inputs)
        graph_ran(inputs, outputs, self.graph.recording)
        return outputs[0]

    def of(self, result: torch.Tensor) -> Any:
        return result

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, lends: bool = False) -> Any:
        return self.step((x,), lends)


class InATuple(Step):
    def of(self, result: torch.Tensor) -> Any:
        return (result,)


class MoreThanItsGraph(Step):
    def of(self, result: torch.Tensor) -> Any:
        return result + 1


class TwoGraphs(Step):
    def call(self, x: torch.Tensor) -> Any:
        self.calls += 1
        first = self.run(x)
        # For what it writes.
        self.run(x)
        return first


class AnotherInput(Step):
    """What moves is no argument: the model makes it anew."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x + 1)


@pytest.fixture
def weight(loaded) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(SIZE, SIZE)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear.plain_linear(x, weight, None)


@pytest.mark.parametrize("kind", [Step, InATuple])
def test_an_answer_asks_until_its_step_is_recorded(weight: torch.Tensor, kind: type[Step]) -> None:
    step, given = kind(weight), []
    for answer in (object(), object()):
        before = step.calls
        for index in range(5):
            x = torch.randn(1, SIZE)
            with steps_of(answer):
                given.append((step.of(step(x)) if kind is Step else step(x)[0], expected(x, weight)))
            assert step.calls - before == (min(index + 1, BEFORE) if before == 0 else 1)
    # Each step's own, whatever came after it.
    assert all(torch.equal(got, right) for got, right in given)


def test_a_step_by_itself_always_asks(weight: torch.Tensor) -> None:
    step, answer = Step(weight), object()
    for _ in range(3):
        with steps_of(answer):
            step(torch.randn(1, SIZE))
    for index in range(3):
        step(torch.randn(1, SIZE))
        assert step.calls == BEFORE + index + 1
    # The answer goes on, and something may have been changed by whoever took those steps.
    with steps_of(answer):
        step(torch.randn(1, SIZE))
    assert step.calls == BEFORE + 4


@pytest.mark.parametrize("kind", [MoreThanItsGraph, TwoGraphs, AnotherInput])
def test_what_is_not_its_graph_alone_asks(weight: torch.Tensor, kind: type[Step]) -> None:
    step, plain, answer = kind(weight), kind(weight), object()
    for index in range(5):
        x = torch.randn(1, SIZE)
        with steps_of(answer):
            got = step(x)
        assert torch.equal(got, plain.call(x)) and step.calls == index + 1


def test_other_sizes_and_tensors_elsewhere_ask(weight: torch.Tensor) -> None:
    step, answer = Step(weight), object()
    with steps_of(answer):
        for rows, calls in ((1, BEFORE), (2, 2 * BEFORE)):
            for _ in range(4):
                x = torch.randn(rows, SIZE)
                assert torch.equal(step(x), expected(x, weight))
            assert step.calls == calls
        weight.data = weight * 2
        x = torch.randn(2, SIZE)
        assert torch.equal(step(x), expected(x, weight)) and step.calls == 2 * BEFORE + 1


def test_results_that_are_lent_are_overwritten(weight: torch.Tensor) -> None:
    step, answer = Step(weight), object()
    with steps_of(answer):
        for _ in range(BEFORE):
            step(torch.randn(1, SIZE), lends=True)
        first = step(torch.randn(1, SIZE), lends=True)
        kept = first.clone()
        x = torch.randn(1, SIZE)
        second = step(x, lends=True)
    assert second is first and not torch.equal(kept, first) and torch.equal(first, expected(x, weight))


def test_who_watches_operators_sees_them(weight: torch.Tensor) -> None:
    class Census(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            Census.seen += 1
            return func(*args, **(kwargs or {}))

    step, answer = Step(weight), object()
    with steps_of(answer):
        for _ in range(3):
            step(torch.randn(1, SIZE))
        with Census():
            step(torch.randn(1, SIZE))
    assert step.calls == BEFORE + 1 and Census.seen > 0


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[None]]:
    """Of compiled graphs by TorchDynamo, which asks the model first; a bucket is 8 slots."""
    monkeypatch.setattr(lengths, "READ_STEP", 8)
    made: list[None] = []
    call = layered.LayeredGraph.__call__
    monkeypatch.setattr(
        layered.LayeredGraph, "__call__", lambda graph, *args: [made.append(None), call(graph, *args)][1]
    )
    with compiling_with("inductor"):
        yield made


def compiled(model: PreTrainedModel, batch_size: int = 1, **options: Any) -> Session:
    cache = ExportableCache.from_model(model, 64, batch_size)
    return Session.from_model(model, cache, compile="wait", prefill_chunk=16, buckets=(8, 16, 32), **options)


def answer(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    """Greedy tokens of the model in eager mode."""
    session = Session.from_model(model, ExportableCache.from_model(model, 64))
    try:
        return [int(token) for token in session.generate(ids, NEW)]
    finally:
        session.close()


@pytest.mark.parametrize("options", [{}, {"graph_cache": True}], ids=["live", "from disk"])
def test_an_answer_asks_the_model_for_each_bucket(calls: list[None], options: dict[str, Any], tmp_path) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4, head_dim=16), tokens(4)
    session = compiled(model, **({"graph_cache": tmp_path} if options else {}))
    for _ in range(2):
        session.reset()
        calls.clear()
        got = [int(token) for token in session.generate(ids, NEW)]
        # The prompt, and two steps of a bucket; the last token is not fed.
        assert len(calls) == 1 + BUCKETS * BEFORE
        assert got == answer(model, ids)


def test_answers_to_the_bit_what_steps_from_python_give(calls: list[None], monkeypatch) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=3, head_dim=16), tokens(4)

    def drawn() -> list[int]:
        with compiled(model) as session:
            return [int(one) for one in session.generate(ids, NEW, temperature=1.0, seed=3, repetition_penalty=1.3)]

    got = drawn()
    monkeypatch.setenv(replay.VARIABLE, "python")
    assert got == drawn()


def test_changes_are_seen_by_the_next_answer_and_other_weights_at_once(calls: list[None]) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=3, head_dim=16), tokens(4)
    session = compiled(model)
    before = [int(token) for token in session.generate(ids, NEW)]
    assert before == answer(model, ids)
    session.close()
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    session = compiled(model)
    after = answer(model, ids)
    session = compiled(model)
    assert after != before and [int(token) for token in session.generate(ids, NEW)] == after
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    session.reset()
    generated = session.generate(ids, NEW)
    assert [int(token) for token in itertools.islice(generated, 20)] == before[:20]
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.roll(1, 0)
    calls.clear()
    next(generated)
    assert len(calls) == 1


def test_logits_of_an_answer_are_its_own(calls: list[None]) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=3, head_dim=16), tokens(40)
    session = compiled(model)
    session.prefill(ids[:, :9])
    with steps_of(object()):
        given = [(logits, logits.clone()) for logits in (session.decode(ids[:, place]) for place in range(9, 15))]
    assert len(calls) < 6 and all(torch.equal(logits, kept) for logits, kept in given)


def test_other_loops_ask_once_for_an_answer(calls: list[None]) -> None:
    model, ids = tiny_model("llama", num_hidden_layers=3, head_dim=16), tokens(9)
    batch = ContinuousBatch(compiled(model), compiled(model, 2))
    for _ in range(2):
        batch.submit(ids, max_new_tokens=7)
        calls.clear()
        assert sum(1 for _ in batch.run()) == 7
        # The prompt among them; the second request finds a recorded step, and asks once.
        assert len(calls) < 7
    session = compiled(model, 2)
    calls.clear()
    beam_search(session, ids, 7)
    assert len(calls) < 7
    model.generation_config.eos_token_id = None
    completer = Completer(compiled(model, tokenizer=letter_tokenizer()))
    calls.clear()
    assert len(list(completer.complete(ids[0].tolist(), CompletionOptions(max_new_tokens=7)))) == 7
    assert len(calls) < 7
