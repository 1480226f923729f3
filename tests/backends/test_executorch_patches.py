"""What is replaced in ExecuTorch's exporter gives what the original gives, and the original is still slower."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower

from exportable_cache.backends.executorch.lowering.patches import PATCHES, XNNPACK_PATCHES
from exportable_cache.common.compat.executorch import edge_config, operator_of
from exportable_cache.common.patch import ORIGINAL


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.label)
def test_the_original_is_the_one_that_the_patch_was_written_for(patch) -> None:
    assert patch.digest() in patch.digests, "upstream changed: read it, then renew the digest or drop the patch"


def test_functional_writes_are_removed_once_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the patch, once for every graph inside it: where that is no longer so, the patch can go."""
    patch = PATCHES[0]
    patch.apply()
    replaced = getattr(import_module(patch.file), patch.name)
    seen = []
    original = getattr(replaced, ORIGINAL)
    counted = original.__globals__["decompose_auto_functionalized"]
    monkeypatch.setitem(
        original.__globals__, "decompose_auto_functionalized", lambda graph: seen.append(graph) or counted(graph)
    )

    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x + 1,))

    program = torch.export.export(Branches(), (torch.randn(3),))
    assert replaced(program) is program and len(seen) == 1
    assert original(program) is program and len(seen) == 1 + 3


def of(call: Callable[..., torch.Tensor]) -> torch.nn.Module:
    class Of(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return call(*inputs)

    return Of()


def graph_of(call: Callable[..., torch.Tensor], *inputs: torch.Tensor, edge: bool = False) -> torch.fx.GraphModule:
    lengths = {"inputs": tuple({0: torch.export.Dim.AUTO} for _ in inputs)}
    program = torch.export.export(of(call), inputs, dynamic_shapes=lengths)
    if edge:
        program = to_edge(program, compile_config=edge_config(skip_dim_order=True)).exported_program()
    return program.graph_module


def operators(graph_module: torch.fx.GraphModule) -> list[str]:
    return [
        str(operator_of(node.target))
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


ROWS, NUMBERS = torch.randn(3, 4), torch.arange(3)
LAST = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
#: A program that the pass changes, by the name of the pass, and whether it is in the edge dialect by then.
WORK = {
    "NormalizeTransposePass": (torch.ops.aten.t.default, (ROWS,), False),
    "ReplaceBrokenOpsWithFunctionalOpsPass": (lambda x: x.view(-1) + 1, (ROWS,), False),
    "SymToTensorPass": (lambda x: torch.ops.aten.add.Tensor(x, x.shape[0]), (NUMBERS,), False),
    "RemoveMixedTypeOperators": (lambda x, y: x + y, (torch.randn(3), NUMBERS), False),
    "LegalizePortableDimOrderPass": (lambda x: x.mean(dim=(2, 3)), (LAST,), True),
}


@pytest.mark.parametrize("patch", PATCHES[1 : -len(XNNPACK_PATCHES)], ids=lambda patch: patch.name.split(".")[0])
@pytest.mark.parametrize("inside", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_pass_runs_where_it_has_work(patch, inside: bool) -> None:
    patch.apply()
    kind = getattr(import_module(patch.file), patch.name.split(".")[0])
    original = getattr(kind.call, ORIGINAL)
    call, inputs, edge = WORK[kind.__name__]

    def branches(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.cond(inputs[0].sum() > 0, lambda *x: call(*x).neg(), lambda *x: call(*x).abs(), inputs)

    graph = graph_of(branches if inside else call, *inputs, edge=edge)
    before = operators(graph)
    result = kind().call(graph)
    assert operators(result.graph_module) == operators(original(kind(), graph).graph_module) != before

    # Nothing to do: the very graph comes back, where the original traces another.
    idle = graph_of(lambda x: torch.relu(x) + x, torch.randn(3, 4), edge=edge)
    result = kind().call(idle)
    assert result.graph_module is idle and not result.modified
    assert original(kind(), idle).graph_module is not idle, "upstream has mended it: drop the patch"


class Everything(torch.nn.Module):
    """A model that gives every patched pass of XNNPACK something to do, except that of attention or quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3)
        self.fused = torch.nn.BatchNorm1d(4)
        self.alone = torch.nn.BatchNorm2d(4)
        self.prelu = torch.nn.PReLU(4)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.relu(self.fused(self.conv(x)))
        many = torch.cat([self.linear(image) * number for number in range(7)], -1)
        pooled = torch.nn.functional.max_pool2d(self.alone(image), 2, 2)
        wide = torch.nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
        return rows, many, pooled, wide, self.prelu(image), image.max(3, keepdim=True)[0]


@pytest.mark.full
def test_xnnpacks_parts_are_the_same_without_passes_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(Everything().eval(), (torch.randn(1, 4, 8), torch.randn(1, 4, 4, 4)))
    replacements, ran = {}, set()

    def originals(kind: type) -> Callable[..., Any]:
        def call(self: Any, graph_module: torch.fx.GraphModule) -> Any:
            ran.add(kind)
            return getattr(replacements[kind], ORIGINAL)(self, graph_module)

        return call

    for patch in XNNPACK_PATCHES:
        patch.apply()
        kind = getattr(import_module(patch.file), str(patch.source))
        replacements[kind] = kind.call
        monkeypatch.setattr(kind, "call", originals(kind))

    def lowered() -> bytes:
        return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer

    expected = lowered()
    for kind, call in replacements.items():
        monkeypatch.setattr(kind, "call", call)
    assert lowered() == expected and len(ran) == len(XNNPACK_PATCHES)
