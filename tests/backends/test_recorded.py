"""Steps whose calls are recorded once and run again without Python, and what makes them run from Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import layered
from exportable_cache.backends.live import replay as recorded
from exportable_cache.backends.live.clone_layers import EqualLayers
from exportable_cache.backends.live.graphs import BoundTensors, binding_tensors
from exportable_cache.backends.live.ops import attention, linear
from exportable_cache.backends.live.replay import ReplayedSteps
from exportable_cache.program import lengths

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

pytestmark = pytest.mark.skipif(not linear.OPERATORS.is_wanted(), reason="there is no C++ compiler")

SIZE = 48
#: The first step of a size shows what is another tensor in each, the second is recorded, the third is not from Python.
BEFORE = 2
#: Of 8 slots, which 40 tokens fill.
BUCKETS = 5


class Graph:
    """A function of an input as steps have it, and how often it ran from Python."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        self.function, self.steps, self.calls = function, ReplayedSteps(BoundTensors(())), 0

    def run(self, inputs: Any) -> tuple[Any, ...]:
        self.calls += 1
        return (self.function(*inputs),)

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor) -> Any:
        (result,) = self.steps(self.run, inputs)
        return result


@pytest.fixture
def weight(loaded) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(SIZE, SIZE)


def test_own_operators_run_again_over_new_inputs(weight: torch.Tensor) -> None:
    other, bias = weight.T.contiguous(), torch.randn(SIZE)

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = linear.plain_linears(linear.plain_linear(x, weight, bias), [weight, other], [])
        query, key = first.view(1, 1, 1, SIZE), second.view(1, 1, 1, SIZE)
        return attention.attention(query, key, key)

    graph, given = Graph(function), []
    for step in range(5):
        x = torch.randn(1, SIZE)
        given.append((graph(x), function(x)))
        assert graph.calls == min(step + 1, BEFORE)
    # Each step's own, whatever came after it.
    assert all(torch.equal(got, expected) for got, expected in given)


def in_8_bits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.full((SIZE,), 0.01)
    return torch.ops.exportable_cache.few_rows_linear_int8(x, (weight * 20).to(torch.int8), scale)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("another operator", lambda x, weight: linear.plain_linear(x, weight, None) + 1),
        ("an operator that makes one of its inputs", in_8_bits),
        ("an input with gaps", lambda x, weight: linear.plain_linear(x.view(SIZE, -1).T, weight, None)),
        ("a view of an input", lambda x, weight: weight[:1]),
    ],
)
def test_what_is_not_recorded_stays_as_it_is(weight: torch.Tensor, kind: str, function: Any) -> None:
    graph = Graph(lambda x: function(x, weight) if kind != "a view of an input" else x[:1])
    for step in range(4):
        x = torch.randn(2, SIZE)
        assert torch.equal(graph(x), function(x, weight) if kind != "a view of an input" else x[:1])
        assert graph.calls == step + 1 and graph.steps._recording is None


def test_what_a_step_writes_to_an_input_is_there(weight: torch.Tensor) -> None:
    graph = Graph(lambda x: linear.plain_linear(x.add_(1), weight, None))
    for step in range(4):
        x = torch.zeros(1, SIZE)
        graph(x)
        assert bool((x == 1).all()), step


def test_what_cannot_be_recorded_keeps_no_memory(weight: torch.Tensor) -> None:
    """A prompt's, which passes all that is between its layers."""
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = linear.plain_linear(x, weight, None) + 1
            alive.append(sum(one() is not None for one in seen))
            seen.append(weakref.ref(x))
        return x

    graph = Graph(function)
    for _ in range(BEFORE):
        graph(torch.randn(1, SIZE))
    assert max(alive) == 0


def test_other_sizes_and_other_tensors_are_recorded_again(weight: torch.Tensor) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear.plain_linear(x, weight, None)

    graph = Graph(function)
    for expected, rows in ((BEFORE, 1), (2 * BEFORE, 2)):
        for _ in range(4):
            x = torch.randn(rows, SIZE)
            assert torch.equal(graph(x, weight), function(x, weight))
        assert graph.calls == expected
    # The same object, elsewhere.
    weight.data = weight * 2
    x = torch.randn(2, SIZE)
    assert torch.equal(graph(x, weight), function(x, weight)) and graph.calls == 2 * BEFORE + 1


def test_tensors_that_a_graph_looks_up_are_seen_to_be_elsewhere(loaded) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    cache = ExportableCache.from_model(model, 64)
    with binding_tensors(model, cache):
        own = BoundTensors([place for place, _ in EqualLayers(model, cache).bound_tensors(3)])
    weight = model.model.layers[3].mlp.up_proj.weight
    assert any(one is weight for one in own.tensors())
    graph = Graph(lambda x: linear.plain_linear(x, weight, None))
    graph.steps = ReplayedSteps(own)
    x = torch.randn(1, weight.shape[1])
    for _ in range(3):
        graph(x.clone())
    assert graph.steps._recording is not None
    weight.data = weight * 2
    assert torch.equal(graph(x), linear.plain_linear(x, weight, None)) and graph.calls == BEFORE + 1


@pytest.mark.parametrize("change", [lambda weight: weight.T, lambda weight: weight[:-1]], ids=["transposed", "cut"])
def test_a_tensor_that_a_graph_looks_up_is_seen_in_another_form(
    loaded, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = tiny_model("llama", num_hidden_layers=4, num_key_value_heads=4)
    cache = ExportableCache.from_model(model, 64)
    with binding_tensors(model, cache):
        own = BoundTensors([place for place, _ in EqualLayers(model, cache).bound_tensors(3)])
    weight = model.model.layers[3].self_attn.o_proj.weight
    assert weight.shape[0] == weight.shape[1] and any(one is weight for one in own.tensors())
    noted, address = own.tensors(), weight.data_ptr()
    assert own.match(noted)
    weight.data = change(weight.data)
    assert weight.data_ptr() == address and not own.match(noted)


class Census(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_who_watches_operators_sees_them(weight: torch.Tensor) -> None:
    graph = Graph(lambda x: linear.plain_linear(x, weight, None))
    for _ in range(3):
        graph(torch.randn(1, SIZE))
    with Census() as census:
        graph(torch.randn(1, SIZE))
    assert graph.steps._recording is not None and census.seen > 0 and graph.calls == BEFORE + 1


@pytest.fixture
def generated_code(monkeypatch) -> Iterator[list[layered.LayeredGraph]]:
    """Graphs compiled by layers, as machine code; a bucket is 8 slots."""
    monkeypatch.setattr(lengths, "READ_STEP", 8)
    made: list[layered.LayeredGraph] = []
    begin = layered.LayeredGraph.__init__
    monkeypatch.setattr(
        layered.LayeredGraph,
        "__init__",
        lambda graph, *args, **options: [begin(graph, *args, **options), made.append(graph)][0],
    )
    with compiling_with("inductor"):
        yield made


def test_steps_of_a_session(generated_code: list[layered.LayeredGraph], monkeypatch) -> None:
    """Past several buckets, to the bit what they give from Python; another model's weights are seen at once."""
    model, ids = tiny_model("llama", num_hidden_layers=3, head_dim=16), tokens(40)
    replays = []
    replay = recorded.Recording.replay
    monkeypatch.setattr(recorded.Recording, "replay", lambda *args: [replays.append(None), replay(*args)][1])

    def session_of() -> Session:
        cache = ExportableCache.from_model(model, 64)
        return Session.from_model(model, cache, compile="wait", prefill_chunk=16, buckets=(8, 16, 32))

    def logits_of(session: Session) -> list[torch.Tensor]:
        session.reset()
        return [session.prefill(ids[:, :4]), *(session.decode(ids[:, place]) for place in range(4, 40))]

    session = session_of()
    got = logits_of(session)
    # Two from Python for each bucket.
    assert len(replays) == 36 - BUCKETS * BEFORE
    monkeypatch.setenv(recorded.VARIABLE, "python")
    expected = logits_of(session_of())
    assert len(replays) == 36 - BUCKETS * BEFORE
    assert all(map(torch.equal, got, expected))

    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    session.reset()
    assert difference(step, reference_logits(model, ids, 4), ids, 4) <= 1e-4
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight * 1.5
    session.reset()
    assert difference(step, reference_logits(model, ids, 4), ids, 4) <= 1e-4
