"""How often a method is decomposed on its way to a program, and copies and activations that are rewritten before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir.backend.utils import get_delegates
from executorch.runtime import Runtime

from exportable_cache.backends.executorch.delegates.xnnpack import AcyclicXnnpackPartitioner
from exportable_cache.backends.executorch.lowering import lower
from exportable_cache.backends.executorch.lowering.rewrites import RemoveNeedlessCopies, indices_to_int64
from exportable_cache.common.compat.executorch import edge_operator

_CLONE = edge_operator(torch.ops.aten.clone.default)


class FeedForward(nn.Module):
    """A linear layer, the approximate gelu, and heads put in order by a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.gelu(self.up(x), approximate="tanh").view(1, -1, 4, 4).transpose(1, 2).contiguous()
        return heads * 2


class Pools(nn.Module):
    """A pooling that XNNPACK takes, and one of longer strides that it does not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(nn.functional.max_pool2d(x, 2, stride=stride) for stride in (2, 3))


def exported(module: nn.Module, *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), inputs)


def test_a_method_is_decomposed_once_and_is_one_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decomposition traces the whole method again: three of them were half of an export's time."""
    calls = []
    original = torch.export.ExportedProgram.run_decompositions

    def counted(program: torch.export.ExportedProgram, *options: object) -> torch.export.ExportedProgram:
        calls.append(program)
        return original(program, *options)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    torch.manual_seed(0)
    module, x = FeedForward(), torch.randn(1, 3, 8)
    edge = lower.to_edge({"forward": exported(module, x)})
    assert len(calls) == 1
    assert len(get_delegates(edge.exported_program().graph_module.graph)) == 1
    program = Runtime.get().load_program(bytes(lower.to_program(edge).buffer))
    (output,) = program.load_method("forward").execute([x])
    # The exact gelu is 4.7e-4 off.
    torch.testing.assert_close(output, module(x), atol=1e-5, rtol=0)


def test_operators_are_kept_whole_where_the_delegate_takes_every_call_of_them() -> None:
    partitioner = AcyclicXnnpackPartitioner()
    whole = exported(FeedForward(), torch.randn(1, 3, 8)).run_decompositions({})
    assert partitioner.kept_operators([whole]) == [torch.ops.aten.linear.default]
    mixed = exported(Pools(), torch.randn(1, 2, 5, 5)).run_decompositions({})
    assert partitioner.kept_operators([whole, mixed]) is None


def graph_of(*read: str) -> GraphModule:
    """An input, a sum of it, a copy of each, and what is given out."""
    graph = torch.fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["sum"] = graph.call_function(torch.ops.aten.add.Tensor, (nodes["x"], 1))
    for name in ("x", "sum"):
        nodes[f"copy of {name}"] = graph.call_function(_CLONE, (nodes[name],))
    graph.output(tuple(nodes[name] for name in read))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(2, 3)
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("read", "left"),
    [(("copy of x", "copy of sum"), 1), (("copy of x", "copy of sum", "sum"), 2)],
    ids=["no other reader", "another reader"],
)
def test_copies_are_removed_where_nobody_else_reads_the_original(read: tuple[str, ...], left: int) -> None:
    """The copy of an input stays, which may be a cache that is written to."""
    graph_module = RemoveNeedlessCopies()(graph_of(*read)).graph_module
    assert len(graph_module.graph.find_nodes(op="call_function", target=_CLONE)) == left


def test_tables_are_looked_up_by_int64() -> None:
    """Operators on tables of 4, 8 and 16 bits end the process for int32, which Chameleon's tokens of images have."""
    table, wide = nn.Embedding(8, 4).eval(), torch.tensor([[1, 7, 0]])
    program = indices_to_int64(torch.export.export(table, (wide.int(),)))
    (lookup,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert lookup.args[1].meta["val"].dtype == torch.int64
    assert torch.equal(program.module()(wide.int()), table(wide))
