"""Partitions that do not wait for one another, where ExecuTorch's own do, and that go through the passes they need."""

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.fx.passes.infra.partitioner import Partition

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.exir import to_edge
from executorch.runtime import Runtime

from exportable_cache.backends.executorch.delegates.xnnpack import has_cycle, is_serialisable, partitions_by_level
from exportable_cache.backends.executorch.lowering.lower import lower_programs


def two_chains() -> tuple[Graph, dict]:
    """x -> a -> outside -> b, and the same of y with c and d."""
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in "xy"}
    for source, before, between, after in (("x", "a", "p", "b"), ("y", "c", "q", "d")):
        nodes[before] = graph.call_function(torch.abs, (nodes[source],))
        nodes[between] = graph.call_function(torch.round, (nodes[before],))
        nodes[after] = graph.call_function(torch.abs, (nodes[between],))
    graph.output((nodes["b"], nodes["d"]))
    return graph, nodes


def test_cycles_are_seen() -> None:
    graph, nodes = two_chains()
    # Each alone can run, but each waits for the other.
    crossed = [Partition(id=0, nodes=[nodes["a"], nodes["d"]]), Partition(id=1, nodes=[nodes["b"], nodes["c"]])]
    assert has_cycle(graph, crossed) and not has_cycle(graph, crossed[:1])
    level = [Partition(id=0, nodes=[nodes["a"], nodes["c"]]), Partition(id=1, nodes=[nodes["b"], nodes["d"]])]
    assert not has_cycle(graph, level)


def test_levels_are_the_fewest_partitions_and_have_no_cycle() -> None:
    graph, nodes = two_chains()
    partitions = partitions_by_level(graph, [[nodes[name]] for name in "abcd"])
    assert [set(partition.nodes) for partition in partitions] == [{nodes["a"], nodes["c"]}, {nodes["b"], nodes["d"]}]
    # A group goes together, and takes what depends on it along.
    grouped = partitions_by_level(graph, [[nodes["a"]], [nodes["b"], nodes["c"]], [nodes["d"]]])
    assert [set(partition.nodes) for partition in grouped] == [{nodes["a"]}, {nodes["b"], nodes["c"]}, {nodes["d"]}]
    assert not has_cycle(graph, partitions) and not has_cycle(graph, grouped)


class Gated(nn.Module):
    """Two linear layers and a gate, as in a feed-forward block; `after` is applied to what they give."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.up, self.gate, self.after = nn.Linear(8, 16), nn.Linear(8, 16, bias=False), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.up(x) * torch.nn.functional.silu(self.gate(x)))


class Concatenated(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * (index + 1) for index in range(self.count)], dim=-1)


@pytest.mark.parametrize(
    ("after", "passes"),
    [(nn.Identity(), 1), (nn.Softmax(-1), 1), (nn.ReLU(), 17), (Concatenated(5), 1), (Concatenated(6), 17)],
    ids=["gate", "softmax", "relu", "cat of 5", "cat of 6"],
)
def test_partitions_go_through_the_passes_they_need(
    after: nn.Module, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused activations and long concatenations need the others; a partition that would not does not pay for them."""
    counts, transform = [], XNNPACKPassManager.transform

    def counted(manager: XNNPACKPassManager) -> torch.export.ExportedProgram:
        counts.append(len(manager.passes))
        return transform(manager)

    monkeypatch.setattr(XNNPACKPassManager, "transform", counted)
    torch.manual_seed(0)
    model, x = Gated(after).eval(), torch.randn(3, 8)
    lowered = lower_programs({"forward": torch.export.export(model, (x,))})
    assert counts == [passes]
    method = Runtime.get().load_program(lowered.buffer).load_method("forward")
    assert (method.execute([x])[0] - model(x)).abs().max() < 1e-5


class Widened(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unsqueeze(1)


@pytest.mark.parametrize("dynamic", [1, 2])
def test_reshapes_of_two_dynamic_sizes_are_left_to_portable_kernels(dynamic: int) -> None:
    sizes = {axis: torch.export.Dim(f"size_{axis}", min=2, max=16) for axis in range(dynamic)}
    program = torch.export.export(Widened(), (torch.ones(4, 5),), dynamic_shapes=(sizes,))
    nodes = to_edge(program).exported_program().graph.nodes
    (reshape,) = (node for node in nodes if "unsqueeze" in str(node.target))
    assert is_serialisable(reshape) == (dynamic == 1)


class Largest(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores - scores.max(self.dim, keepdim=True).values


@pytest.mark.parametrize("dim", [3, -1])
def test_maxima_of_other_dimensions_are_left_to_portable_kernels(dim: int) -> None:
    """The softmax of attention with sinks has one, counted from the end, at which XNNPACK's compiler fails."""
    model, x = Largest(dim), torch.randn(1, 2, 3, 5)
    lowered = lower_programs({"forward": torch.export.export(model, (x,))})
    (plan,) = lowered.executorch_program.execution_plan
    assert any(one.name.startswith("aten::max") for one in plan.operators) is (dim == -1)
    method = Runtime.get().load_program(lowered.buffer).load_method("forward")
    assert (method.execute([x])[0] - model(x)).abs().max() < 1e-6
