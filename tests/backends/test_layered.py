"""Compiled graphs by regions: one layer of each kind compiled, and one graph for all read lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.layered import LayeredBackend
from exportable_cache.backends.live.regions import regions_of
from exportable_cache.common.compat.torch_compile import InductorByRanges
from exportable_cache.program import lengths

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

CAPACITY = 64
#: What runs before the layers, and what after them.
AROUND = 2


@pytest.fixture(autouse=True)
def generated_code(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(lengths, "READ_STEP", 8)
    counters.clear()
    with compiling_with("inductor"), torch._dynamo.config.patch(error_on_recompile=True):
        yield


def session_of(model, buckets: tuple[int, ...] = (8, 16, 32), **options) -> Session:
    cache = ExportableCache.from_model(model, CAPACITY, rollback_slots=options.pop("rollback_slots", 0))
    return Session.from_model(model, cache, compile="wait", prefill_chunk=16, buckets=buckets, **options)


def worst(session: Session, model, prompts: tuple[int, ...] = (3, 8, 21)) -> float:
    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    ids, found = tokens(50), 0.0
    for prompt in prompts:
        session.reset()
        found = max(found, difference(step, reference_logits(model, ids, prompt), ids, prompt))
    return found


def counts(session: Session) -> tuple[int, int]:
    return session.runner.compiler.layered.compiled, session.runner.compiler.layered.called


def test_one_layer_is_compiled_and_one_graph_reads_any_length(tmp_path: Path) -> None:
    """The ways to choose share them, and a later session loads them."""
    # As many as are needed for some to be copies of a traced one.
    model = tiny_model("llama", num_hidden_layers=5)
    model.generation_config.eos_token_id = None
    session = session_of(model, steps_per_launch=2, graph_cache=tmp_path)
    assert worst(session, model) <= 1e-4
    # A prompt and a step, past three buckets.
    assert counts(session) == (2 * (AROUND + 1), 2 * (AROUND + 5))
    assert counters["stats"]["unique_graphs"] == 2
    eager = Session.from_model(model, ExportableCache.from_model(model, CAPACITY))
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        session.reset(), eager.reset()
        assert list(session.generate(tokens(5), 9, **options)) == list(eager.generate(tokens(5), 9, **options))
    # The drawing of a token besides: no step is traced again for it.
    assert counts(session) == (2 * (AROUND + 1) + 1, 2 * (AROUND + 5))
    assert [key.step.method for key in session.runner._calls] == ["prefill", "decode", "choice"]
    # Another tensor in the place of a copied layer's own is found there.
    projection = model.model.layers[2].mlp.up_proj
    before = reference_logits(model, tokens(8), 8)
    again = session_of(model, steps_per_launch=2, graph_cache=tmp_path)
    again.prefill(tokens(3)), again.decode(tokens(1)[0])
    projection.weight = torch.nn.Parameter(2 * projection.weight.detach())
    assert worst(again, model) <= 1e-4 and not torch.allclose(reference_logits(model, tokens(8), 8), before, atol=1e-3)
    assert (again.runner.graph_cache.loaded, again.runner.graph_cache.compiled) == (2, 0)


@pytest.mark.full
def test_layers_of_two_kinds_are_compiled_once_each() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma3_text", num_hidden_layers=4, layer_types=types)
    session = session_of(model, buckets=())
    assert worst(session, model) <= 1e-4
    kinds = len(set(model.config.layer_types))
    compiled, called = counts(session)
    assert kinds == 2 and called == 2 * (AROUND + 4)
    assert compiled <= 2 * (AROUND + 2 * kinds)


def captured(function, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    found = []

    def keep(module, inputs):
        found.append(module)
        return module.forward

    with torch.no_grad():
        torch.compile(function, fullgraph=True, backend=keep)(*inputs)
    return found[0]


class Layer(torch.nn.Module):
    def __init__(self, shared: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("kept", torch.zeros(4) if shared is None else shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.add_(x.sum(0))
        return torch.relu(x @ self.weight) + self.kept


class Stack(torch.nn.Module):
    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_write_their_own_state() -> None:
    stack, backend = Stack([Layer(), Layer(), Layer()]), LayeredBackend()
    expected = Stack([Layer(), Layer(), Layer()])
    expected.load_state_dict(stack.state_dict())
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled = torch.compile(stack, fullgraph=True, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected(x))
    for layer, other in zip(stack.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.kept, other.kept)
    assert (backend.compiled, backend.called) == (1, 3)


def test_layers_that_write_what_another_input_of_theirs_views_are_compiled_whole() -> None:
    """A region takes its inputs for different tensors."""

    class Both(Layer):
        def forward(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
            self.kept.add_(1)
            return x + view + self.kept

    class Views(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, self.views[0])
            return x

    kept = torch.zeros(4)
    stack = Views([Both(kept), Both(kept)])
    stack.views = [kept[:]]
    assert regions_of(captured(stack, torch.randn(3, 4))) == []


def test_layers_that_differ_in_a_number_are_not_taken_for_equal() -> None:
    class Scaled(Layer):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ self.weight) * self.scale

    regions = regions_of(captured(Stack([Scaled(1.5), Scaled(1.5), Scaled(2.5)]), torch.randn(3, 4)))
    assert len(regions) == 3 and len({region.text for region in regions}) == 2


def test_a_graph_without_equal_layers_is_compiled_whole() -> None:
    backend = LayeredBackend()
    layer, x = Layer(), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(layer, fullgraph=True, backend=backend)(x), torch.relu(x @ layer.weight) + x.sum(0)
        )
    assert (backend.compiled, backend.called) == (1, 0)


@pytest.mark.parametrize(
    "make, layers",
    [(LayeredBackend, 0), (LayeredBackend, 3), (lambda: InductorByRanges("default", None), 0)],
    ids=["no region", "regions", "whole"],
)
def test_a_graph_of_a_longer_range_is_not_taken_from_torchs_cache(make, layers: int, tmp_path, monkeypatch) -> None:
    """Torch's keys lack the ranges of sizes, and what it finds under them has the guards of the range before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    stack = Stack([Layer() for _ in range(layers)])
    for longest in (16, 64):
        torch._dynamo.reset()
        x = torch.randn(3, 4)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=longest)
        backend = make()
        with torch.no_grad():
            compiled = torch.compile(stack if layers else lambda x: torch.sin(x) + 1, fullgraph=True, backend=backend)
            found = compiled(x)
            if layers:
                assert (backend.compiled, backend.called) == (1, layers)
            else:
                torch.testing.assert_close(found, torch.sin(x) + 1)


@pytest.mark.full
def test_nor_where_a_whole_graph_is_compiled_with_a_mode(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for longest in (16, 64):
        torch._dynamo.reset()
        model = tiny_model("llama", num_hidden_layers=1)
        cache = ExportableCache.from_model(model, 96)
        session = Session.from_model(model, cache, compile="wait", mode="default", prefill_chunk=longest, buckets=False)
        ids = tokens(7)
        torch.testing.assert_close(session.prefill(ids), model(ids).logits[:, -1], atol=1e-4, rtol=0)
        session.close()
