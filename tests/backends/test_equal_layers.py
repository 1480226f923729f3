"""Of equal layers three are traced, and one of them explains all others, or every layer is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.clone_layers import CloneError, EqualLayers, MarkedLayers, take_marks
from exportable_cache.backends.live.graph_cache import BoundTensors, OutdatedGraph, binding_tensors
from exportable_cache.backends.live.regions import Region, regions_of
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.common.compat.transformers import cache_name

from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

CAPACITY = 32


def cache_of(model: Any) -> ExportableCache:
    return ExportableCache.from_model(model, CAPACITY)


@pytest.fixture
def forward_of_llama(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    def replace(forward: Callable) -> None:
        own = LlamaDecoderLayer.forward

        def replaced(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(self, own(self, hidden_states, *args, **kwargs), kwargs)

        monkeypatch.setattr(LlamaDecoderLayer, "forward", replaced)

    return replace


def captured(model: Any, cache: ExportableCache, length: int) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A step of a model as TorchDynamo leaves it, and its inputs."""
    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append((module, inputs))
        return lambda *inputs: [None]

    # Each call compiles the same code object, which TorchDynamo does so many times.
    torch._dynamo.reset()
    runner = ModuleRunner(model, cache)
    module = runner.modules["decode" if length == 1 else "prefill"]
    step = torch.compile(lambda ids, at: module(ids, at), fullgraph=True, backend=keep)
    with torch.no_grad():
        step(tokens(length), torch.tensor([0]))
    runner.close()
    return found[0]


def traced(
    model: Any, cache: ExportableCache, length: int = 1
) -> tuple[torch.fx.GraphModule, list[Any], MarkedLayers | None]:
    """A step of which some layers were traced, its inputs, and its marks, which are taken out."""
    equal = EqualLayers(model, cache)
    with equal.tracing_few():
        graph, inputs = captured(model, cache, length)
    return graph, inputs, take_marks(graph, inputs, equal.bound_tensors)


def calls(
    regions: list[Region], graph: torch.fx.GraphModule, tensors: list[Any]
) -> list[tuple[str, list[torch.Tensor | None]]]:
    """Each with the tensors that it is given, None for what is computed.

    Args:
        tensors: Of the graph's inputs.
    """
    known = dict(zip(graph.graph.find_nodes(op="placeholder"), tensors, strict=True))
    return [(region.text, [known.get(node) for node in region.inputs]) for region in regions]


@pytest.mark.parametrize(
    ("family", "length"),
    [
        ("llama", 1),
        pytest.param("llama", 4, marks=pytest.mark.full),
        pytest.param("gemma3_text", 1, marks=pytest.mark.full),
        pytest.param("gemma3_text", 4, marks=pytest.mark.full),
    ],
)
def test_what_is_stamped_is_what_is_traced(family: str, length: int) -> None:
    """The regions of a graph are those of one in which every layer was traced."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 4} if family != "llama" else {}
    model = tiny_model(family, num_hidden_layers=8 if kinds else 5, **kinds)
    cache = cache_of(model)
    graph, known, marks = traced(model, cache, length)
    assert marks is not None
    with binding_tensors(model, cache):
        own = BoundTensors(marks.bound).tensors()
    ours = calls(marks.cloned(regions_of(graph)), graph, [*known, *own])
    every, inputs = captured(model, cache, length)
    assert take_marks(every, inputs, EqualLayers(model, cache).bound_tensors) is None and len(graph.graph.nodes) < len(
        every.graph.nodes
    )
    theirs = calls(regions_of(every), every, inputs)
    assert [text for text, _ in ours] == [text for text, _ in theirs]
    weights = {id(tensor) for tensor in model.parameters()} | {id(tensor) for _, tensor in cache.named_state()}
    for (_, given), (_, expected) in zip(ours, theirs, strict=True):
        found = [id(tensor) if id(tensor) in weights else None for tensor in given]
        assert found == [id(tensor) if id(tensor) in weights else None for tensor in expected] and any(found)
    # TorchDynamo knows nothing of what the others have.
    others = {id(tensor) for number in marks.equal for tensor in model.model.layers[number].parameters()}
    assert others and not others & {id(tensor) for tensor in known}
    layers = 3 * len(EqualLayers(model, cache).kinds)
    assert len(marks.traced) == layers and len(marks.equal) == model.config.num_hidden_layers - layers


def why_not_cloned(model: Any, cache: ExportableCache) -> str:
    graph, _, marks = traced(model, cache)
    assert marks is not None
    with pytest.raises(CloneError) as caught:
        marks.cloned(regions_of(graph))
    return str(caught.value)


def test_a_layer_that_reads_another_ones_keys_is_no_template(forward_of_llama: Callable) -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    cache = cache_of(model)
    name = cache_name()
    forward_of_llama(lambda self, hidden, kwargs: hidden + kwargs[name].layers[3].keys.sum())
    assert "of another layer" in why_not_cloned(model, cache)


def test_layers_whose_graphs_differ_are_no_templates(forward_of_llama: Callable) -> None:
    """What no attribute of a layer tells, the graph of the last one does."""
    model = tiny_model("llama", num_hidden_layers=5)
    cache = cache_of(model)
    last = model.model.layers[-1]
    forward_of_llama(lambda self, hidden, kwargs: hidden * 2 if self is last else hidden)
    assert "layers 1 and 4 differ" in why_not_cloned(model, cache)


def test_layers_that_ask_for_their_number_are_traced(forward_of_llama: Callable) -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    cache = cache_of(model)
    forward_of_llama(lambda self, hidden, kwargs: hidden)
    assert EqualLayers(model, cache).kinds == [(0, 1, 2, 3, 4)]

    def numbered(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states * (1 + self.self_attn.layer_idx)

    LlamaDecoderLayer.forward = numbered  # undone with the fixture's own
    assert EqualLayers(model, cache).kinds == []


@pytest.mark.parametrize("differ", ["weight", "number", "hook", "rows"])
def test_layers_that_differ_are_of_two_kinds(differ: str) -> None:
    model = tiny_model("llama", num_hidden_layers=9)
    cache = cache_of(model)
    for layer in model.model.layers[4:]:
        if differ == "weight":
            layer.mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(64))
        elif differ == "number":
            layer.self_attn.scaling *= 2
        elif differ == "hook":
            layer.mlp.register_forward_hook(print)
        else:
            layer.self_attn.kept = torch.zeros(3)
    # Hooks have a number each.
    assert EqualLayers(model, cache).kinds == [(0, 1, 2, 3), (4, 5, 6, 7, 8)][: 1 if differ == "hook" else 2]


def test_who_else_runs_the_model_meanwhile_gets_its_layers() -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    equal = EqualLayers(model, cache_of(model))
    expected, classes = model(tokens(4)).logits, [type(layer) for layer in model.model.layers]
    with equal.tracing_few():
        assert [type(layer) for layer in model.model.layers] != classes
        assert torch.equal(model(tokens(4)).logits, expected)
    assert [type(layer) for layer in model.model.layers] == classes


def test_few_layers_are_all_traced() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    assert EqualLayers(model, cache_of(model)).kinds == []


def session_of(model: Any, folder: Path) -> Session:
    return Session.from_model(model, cache_of(model), compile="wait", prefill_chunk=16, graph_cache=folder)


def worst(session: Session, model: Any) -> float:
    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    ids = tokens(24)
    return difference(step, reference_logits(model, ids, 5), ids, 5)


# In the fast lane: test_layered.py, which compiles the same layers.
@pytest.mark.full
@pytest.mark.usefixtures("inductor")
def test_graphs_are_kept_and_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    classes = [type(layer) for layer in model.model.layers]
    session = session_of(model, tmp_path)
    assert worst(session, model) <= 1e-4
    assert [type(layer) for layer in model.model.layers] == classes
    backend = session.runner.compiler.layered
    # What is before the layers, one layer, and what is behind them; of a prompt and of a step.
    assert (backend.compiled, backend.called) == (6, 14)
    again = session_of(model, tmp_path)
    assert worst(again, model) <= 1e-4
    # Another tensor in the place of a layer's own is found there.
    projection = model.model.layers[2].mlp.up_proj
    before = reference_logits(model, tokens(8), 8)
    projection.weight = torch.nn.Parameter(2 * projection.weight.detach())
    again.reset()
    assert worst(again, model) <= 1e-4 and not torch.allclose(reference_logits(model, tokens(8), 8), before, atol=1e-3)
    assert (again.runner.graph_cache.loaded, again.runner.graph_cache.compiled) == (2, 0)


@pytest.mark.parametrize("change", ["dtype", "shape", "gone"])
def test_a_tensor_of_another_kind_makes_a_graph_outdated(change: str) -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    cache = cache_of(model)
    with binding_tensors(model, cache):
        own = BoundTensors([place for place, _ in EqualLayers(model, cache).bound_tensors(2)])
    found = {id(tensor) for tensor in own.tensors()}
    assert found == {id(tensor) for tensor in model.model.layers[2].parameters()} | {
        id(tensor) for name, tensor in cache.layers[2].named_state() if name != "cumulative_length"
    }
    weight = model.model.layers[2].mlp.up_proj.weight
    if change == "dtype":
        weight.data = weight.data.half()
    elif change == "shape":
        weight.data = weight.data[:1]
    else:
        model.model.layers[2].mlp.up_proj.weight = None
    with pytest.raises(OutdatedGraph):
        own.tensors()
    with binding_tensors(model, cache), pytest.raises(OutdatedGraph):
        BoundTensors(own.specs)


def test_a_tensor_that_two_layers_have_is_one() -> None:
    """As where every layer is traced."""
    model = tiny_model("llama", num_hidden_layers=6)
    cache = cache_of(model)
    shared = model.model.layers[1].mlp.up_proj.weight
    for number in (2, 3):
        model.model.layers[number].mlp.up_proj.weight = shared
    graph, inputs, marks = traced(model, cache)
    assert marks is not None
    places = dict(zip((id(tensor) for tensor in inputs), graph.graph.find_nodes(op="placeholder")))
    for number in (2, 3):
        assert places[id(shared)] in marks.equal[number].tensors
    assert [spec.layer for spec in marks.bound if spec.module and spec.module.endswith("up_proj")] == [4]


@pytest.mark.full
@pytest.mark.usefixtures("inductor")
def test_what_cannot_be_stamped_is_traced(
    tmp_path: Path, forward_of_llama: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    last = model.model.layers[-1]
    forward_of_llama(lambda self, hidden, kwargs: hidden * 2 if self is last else hidden)
    with caplog.at_level(logging.INFO, "exportable_cache"):
        session = session_of(model, tmp_path)
        assert worst(session, model) <= 1e-4
    assert "tracing every layer" in caplog.text and "differ" in caplog.text
    assert session.runner.graph_cache.compiled == 2
