"""Equal layers are lowered once, and the program is the one that lowers each of them."""

from __future__ import annotations

import gc
import logging
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.fx.node import map_arg
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, export
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir.backend.utils import get_delegates

from exportable_cache.backends.executorch.dedup import delegates
from exportable_cache.backends.executorch.dedup.delegates import ClonedSegments
from exportable_cache.backends.executorch.dedup.segments import traced_order
from exportable_cache.backends.executorch.graph_edits import drop_provenance
from exportable_cache.backends.executorch.lowering import lower
from exportable_cache.backends.executorch.options import ExecutorchOptions
from exportable_cache.backends.executorch.quantized import FoldedLinears, fold_linears
from exportable_cache.backends.executorch.target import backend
from exportable_cache.common.compat.executorch import load_program

#: What lies between the attention of one layer and that of the next is there three times.
LAYERS = 4
QUANTIZED = Quantization("8da4w", 32, None)
#: Between XNNPACK and torch, over activations in 8 bits.
ROUNDING = 1e-2


def programs_of(model: PreTrainedModel) -> dict:
    spec = backend.program_spec(ProgramSpec(16), ExecutorchOptions())
    cache = ExportableCache.from_model_spec(model, CacheSpec(32), attn_implementation=None)
    program = Program(model, cache, spec)
    return {name: program.export(name) for name in program.methods}


def model_of(layers: int, quantized: bool = True, family: str = "qwen3", **fields: object) -> PreTrainedModel:
    model = tiny_model(family, num_hidden_layers=layers, intermediate_size=96, **fields)
    return quantize(model, QUANTIZED).model if quantized else model


@pytest.fixture(scope="module")
def cloned() -> tuple[object, list[int]]:
    """A quantised model of four layers, lowered by cloning, and how many operators went through each lowering."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        sizes = counted(monkeypatch)
        return lower.to_edge(programs_of(model_of(LAYERS))), sizes


class _Counted(Exception):
    """All was counted that was to be."""


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> list[int]:
    """Operators of each program that goes through ExecuTorch's lowering, which ends before the last to be counted."""
    sizes = []
    original = lower.exir.to_edge

    def count(programs: dict, *options: object) -> object:
        sizes.append(sum(len(program.graph.nodes) for program in programs.values()))
        if len(sizes) == stop_at:
            raise _Counted
        return original(programs, *options)

    monkeypatch.setattr(lower, "exir", SimpleNamespace(to_edge=count))
    return sizes


def outputs_of(lowered: object, path: Path, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    lower_path = path / "program.pte"
    with lower_path.open("wb") as file:
        lowered.write_to_file(file)
    (output,) = load_program(lower_path).load_method("forward")(inputs)
    return output.clone()


def check_same_program(cloned: object, quantized: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as where every layer is lowered: names of data, delegates, logits to the bit."""
    inputs = (torch.randint(3, 100, (1, 7)), torch.zeros(1, dtype=torch.int64))
    monkeypatch.setattr(ClonedSegments, "replace", lambda self, program, state: program)
    whole = lower.to_edge(programs_of(model_of(LAYERS, quantized)))
    names = [set(edge._named_data_store.pte_data) for edge in (cloned, whole)]
    assert names[0] == names[1]
    calls = [[call.backend_id for _, call, _ in get_delegates_of(edge)] for edge in (cloned, whole)]
    assert calls[0] == calls[1], calls
    results = [outputs_of(lower.to_program(edge), path, inputs) for edge in (cloned, whole)]
    assert torch.equal(*results)


def test_a_cloned_program_is_the_model(cloned, tmp_path: Path) -> None:
    edge, sizes = cloned
    # A layer that is lowered separately would add its operators, nearly as many as the segment has.
    assert len(sizes) == 2 and sizes[0] < sizes[1] < 2 * sizes[0]
    # Where an activation lies between two integers, the two may round it to one and the other: not after these.
    ids = torch.randint(3, 100, (1, 7), generator=torch.Generator().manual_seed(0))
    found = outputs_of(lower.to_program(edge), tmp_path, (ids, torch.zeros(1, dtype=torch.int64)))
    with torch.no_grad():
        expected = model_of(LAYERS)(ids).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=ROUNDING, rtol=0)
    # Layers have weights of their own, and where each went shows.
    weights = model_of(LAYERS)
    layers = weights.model.layers
    layers[1].mlp, layers[2].mlp = layers[2].mlp, layers[1].mlp
    with torch.no_grad():
        assert (weights(ids).logits[:, -1] - expected).abs().max() > 10 * ROUNDING


@pytest.mark.full
def test_a_cloned_program_is_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not the shared one, of which a program was made: that can be done once.
    check_same_program(lower.to_edge(programs_of(model_of(LAYERS))), True, tmp_path, monkeypatch)


@pytest.mark.full
def test_a_cloned_program_of_floats_is_the_same_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same_program(lower.to_edge(programs_of(model_of(LAYERS, False))), False, tmp_path, monkeypatch)


def get_delegates_of(edge: object) -> list:
    graph_module = edge.exported_program("forward").graph_module
    return [(node.name, getattr(graph_module, node.target), node) for node in get_delegates(graph_module.graph)]


def sizes_of(layers: int, native: bool) -> list[int]:
    """Operators of each program that a model's lowering goes through."""
    with pytest.MonkeyPatch.context() as monkeypatch, suppress(_Counted):
        sizes = counted(monkeypatch, stop_at=2)
        lower.to_edge(programs_of(model_of(layers)), native=native)
    return sizes


@pytest.mark.full
@pytest.mark.parametrize("native", [False, True])
def test_what_is_lowered_does_not_grow_with_the_layers(cloned, native: bool) -> None:
    fewer, sizes = sizes_of(LAYERS, native) if native else cloned[1], sizes_of(LAYERS + 1, native)
    assert len(fewer) == len(sizes) == 2 and sizes[0] == fewer[0]
    # A layer more is its inputs and calls, not its operators.
    assert sizes[1] - fewer[1] < fewer[0] / 2


def test_layers_of_our_own_operators_are_lowered_once_too(cloned) -> None:
    """A segment first; a program whose layers are each lowered has no other before it, and holds their operators."""
    sizes = sizes_of(LAYERS, native=True)
    assert len(sizes) == 2 and sizes[1] - cloned[1][1] < sizes[0] / 2


@pytest.mark.full
def test_operators_of_our_own_read_the_weights_of_their_layers() -> None:
    edge = lower.to_edge(programs_of(model_of(LAYERS)), native=True)
    program = edge.exported_program("forward")
    calls = [node for node in program.graph.nodes if re.search(r"linears?_4bit", str(node.target))]
    weights = [one for call in calls for one in (call.args[1] if isinstance(call.args[1], list) else [call.args[1]])]
    read = {program.graph_signature.inputs_to_parameters[one.name] for one in weights}
    # Seven in each layer, of which three and two are one call, and the head.
    assert len(calls) == 4 * LAYERS + 1 and len(weights) == len(read) == 7 * LAYERS + 1


@pytest.mark.full
def test_what_cannot_be_explained_is_lowered_in_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without knowing how weights are packed nothing is cloned, nothing is wrong, and the log says why."""
    caplog.set_level(logging.INFO, "exportable_cache")
    monkeypatch.setattr(delegates, "_PACKINGS", {})
    sizes = counted(monkeypatch)
    segments = []
    original = ClonedSegments.replace

    def take(self: ClonedSegments, program: object, **options: object) -> object:
        segments.append(self)
        return original(self, program, **options)

    monkeypatch.setattr(ClonedSegments, "replace", take)
    lower.to_edge(programs_of(model_of(4, quantized=False)))
    assert sizes[-1] > sizes[0]
    assert len(segments[0].left) == 1 and "match no tensor of the segment" in segments[0].left[0]
    (message,) = [record.getMessage() for record in caplog.records if record.name == delegates.__name__]
    assert message.startswith("equal layers are lowered separately") and segments[0].left[0] in message


def test_a_quantised_layer_is_one_operator_while_it_is_lowered() -> None:
    (program,) = programs_of(model_of(1)).values()
    before = len(program.graph.nodes)
    fold_linears(program)
    targets = [str(node.target) for node in program.graph.nodes]
    # Seven in the layer, and the head.
    assert targets.count("exportable_cache.quantized_linear.default") == 8
    assert not any("torchao" in target for target in targets)
    assert before - len(program.graph.nodes) >= 8 * 6


def described(program: object) -> list[str]:
    """The graph's nodes by their places."""
    nodes = {node: f"%{index}" for index, node in enumerate(program.graph.nodes)}
    return [
        f"{node.op} {node.target} {map_arg((node.args, node.kwargs), nodes.get)} {node.meta.get('val')}"
        for node in nodes
    ]


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.full), True])
def test_layers_are_traced_as_what_they_are_folded_into(bias: bool) -> None:
    model = model_of(1, attention_bias=bias)
    (after,) = programs_of(model).values()
    with FoldedLinears(model):
        (while_traced,) = programs_of(model).values()
    # None is left for the folding that comes after.
    assert not any("torchao" in str(node.target) for node in while_traced.graph.nodes)
    assert described(fold_linears(while_traced)) == described(fold_linears(after))


def test_layers_over_two_dimensions_are_folded_after_the_trace() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32))
    layers.requires_grad_(False)
    quantized = quantize_layers(layers)
    with FoldedLinears(quantized):
        program = torch.export.export(quantized, (torch.randn(3, 32),))
    assert any("torchao" in str(node.target) for node in program.graph.nodes)
    assert not any("torchao" in str(node.target) for node in fold_linears(program).graph.nodes)


def quantize_layers(layers: torch.nn.Module) -> torch.nn.Module:
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.utils import unwrap_tensor_subclass

    quantize_(layers, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
    return unwrap_tensor_subclass(layers)


@torch.library.custom_op("exportable_cache_tests::write", mutates_args=("state",))
def write(state: torch.Tensor, rows: torch.Tensor) -> None:
    state.copy_(rows)


@torch.library.custom_op("exportable_cache_tests::read", mutates_args=())
def read(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return state + rows


@read.register_fake
def _(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


class Written(torch.nn.Module):
    """A buffer that is written to and read in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("state", torch.zeros(1, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.way == "temporary":
            return (rows + 1).mul_(2)
        if self.way == "view":
            self.state[:, :2].copy_(rows[:, :2])
            return self.state.sum()
        before = read(self.state, rows)
        write(self.state, rows)
        return before + read(self.state, rows)


@torch.no_grad()
def traced(way: str) -> object:
    return torch.export.export(Written(way), (torch.randn(1, 4),))


def test_the_order_of_writes_is_read_off_a_trace() -> None:
    """What reads a cache stays behind the write before it, and ahead of the one after it."""
    program = traced("kernels")
    order = traced_order(program)
    calls = [node for node in program.graph.nodes if "tests.read" in str(node.target)]
    (written,) = (node for node in program.graph.nodes if "tests.write" in str(node.target))
    (state,) = order.states
    assert program.graph_signature.inputs_to_buffers[state.name] == "state"
    assert [list(order.before(node)) for node in (calls[0], written, calls[1])] == [[], [calls[0]], [written]]
    # The last read, put first, waits for the write, and that for the first.
    calls[0].prepend(calls[1])
    order.restore(program.graph)
    nodes = list(program.graph.nodes)
    assert nodes.index(calls[0]) < nodes.index(written) < nodes.index(calls[1])
    program.graph.lint()


@pytest.mark.parametrize("way", ["kernels", "view"])
def test_states_of_a_functional_program_are_what_it_writes(way: str) -> None:
    program = traced(way).run_decompositions({})
    (state,) = traced_order(program).states
    assert program.graph_signature.inputs_to_buffers[state.name] == "state"


@pytest.mark.parametrize("way", ["temporary", "view"])
def test_other_writes_want_a_functional_graph(way: str) -> None:
    assert traced_order(traced(way)) is None


def test_decoders_over_fused_caches_are_not_made_functional_first() -> None:
    (program,) = programs_of(model_of(3, quantized=False)).values()
    assert traced_order(program) is not None


def test_histories_are_forgotten_in_inner_graphs_too() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x + 1,))

    graph_module = torch.export.export(Branches(), (torch.randn(3),)).run_decompositions({}).graph_module
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert len(graphs) == 3 and all(any("from_node" in node.meta for node in graph.nodes) for graph in graphs)
    drop_provenance(graph_module)
    assert not any("from_node" in node.meta for graph in graphs for node in graph.nodes)


class Block(torch.nn.Module):
    """Operators with keywords among others, and a state that each run of them ends at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(6):
            y = torch.tanh(self.linear(y))
        self.state.index_copy_(0, torch.zeros(1, dtype=torch.int64), (3 * y).to(torch.int32).to(torch.float32) + y)
        return x + self.state


def test_keywords_of_operators_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks, x = torch.nn.Sequential(*(Block() for _ in range(4))), torch.randn(1, 8)
    program = torch.export.export(blocks, (x,))
    sizes = counted(monkeypatch)
    lowered = lower.lower_programs({"forward": program})
    assert len(sizes) == 2
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(lowered, tmp_path, (x,)), blocks(x), atol=1e-5, rtol=0)


#: Layers that take turns, norms that add one to their weights, experts, states that are no keys and values.
FAMILIES = {
    "gemma3_text": {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "num_hidden_layers": 8},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 4, "num_hidden_layers": 8},
    "mamba2": {"num_hidden_layers": 5, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2},
    "qwen3_moe": {"num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_several_kinds_of_layers_are_verified(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = []
    original = ClonedSegments.replace
    monkeypatch.setattr(
        ClonedSegments,
        "replace",
        lambda self, *given, **options: segments.append(self) or original(self, *given, **options),
    )
    bundle = export(tiny_model(family, **FAMILIES[family]), max_cache_len=48, output_dir=tmp_path / "x")
    assert bundle.manifest.verification["passed"] and not segments[0].left and segments[0].count >= 3


@pytest.mark.full
def test_an_export_keeps_nothing_of_its_program(tmp_path: Path) -> None:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    before = {id(held) for held in gc.get_objects() if isinstance(held, LoweredBackendModule)}
    model = tiny_model("llama", num_hidden_layers=4, hidden_size=64, head_dim=16)
    export(model, "executorch", 32, tmp_path / "out", verify=False, quantize="8da4w")
    # Some of its modules are remembered by ExecuTorch and torch, but not what was packed for them.
    modules = [held for held in gc.get_objects() if isinstance(held, LoweredBackendModule)]
    data = [module.named_data_store_output for module in modules if id(module) not in before]
    assert not any(one is not None and one.buffers for one in data)
