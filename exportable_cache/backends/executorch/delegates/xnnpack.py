"""The delegate XNNPACK. Its partitions are free of circular dependencies, and skip compiler passes they do not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_grouped_partitions_from_list_of_nodes,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, PartitionResult
from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from ....common.compat.torch import OpOverload


def partitioner() -> AcyclicXnnpackPartitioner:
    """Return the partitioner of the delegate."""
    return AcyclicXnnpackPartitioner()


#: Read by backends/xnnpack/xnnpack_preprocess.py; the runtime ignores it.
LINEAR_ONLY = CompileSpec("dqlinear_partitioner", b"")

_ATEN = (
    *("linear.default", "addmm.default", "mm.default", "bmm.default"),
    *("_softmax.default", "sigmoid.default", "tanh.default", "gelu.default"),
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default"),
    *("exp.default", "log.default", "sqrt.default", "rsqrt.default", "pow.Tensor_Scalar", "neg.default", "abs.default"),
    *("sin.default", "cos.default", "clamp.default"),
    *("permute_copy.default", "view_copy.default", "unsqueeze_copy.default", "slice_copy.Tensor"),
)
_TORCHAO = ("choose_qparams_affine.default", "quantize_affine.default", "dequantize_affine.default")
#: Operators that no other pass changes. Only torchao's have several results.
PLAIN = frozenset((*(f"aten.{name}" for name in _ATEN), *(f"torchao.{name}" for name in _TORCHAO), "getitem"))
#: Limit of tensors that XNNPACK concatenates at once; a pass splits longer lists.
LONGEST_CAT = 5


def skip_unneeded_passes(result: PartitionResult) -> PartitionResult:
    """Return the partitions, with those of plain operators marked to run one XNNPACK pass only."""
    nodes: dict[str, list[Node]] = {tag: [] for tag in result.partition_tags}
    for node in result.tagged_exported_program.graph.nodes:
        if node.op == "call_function" and node.meta.get("delegation_tag") in nodes:
            nodes[node.meta["delegation_tag"]].append(node)
    specs = {
        tag: _linear_only(spec) if all(map(is_plain, nodes[tag])) else spec
        for tag, spec in result.partition_tags.items()
    }
    return PartitionResult(tagged_exported_program=result.tagged_exported_program, partition_tags=specs)


def is_plain(node: Node) -> bool:
    """Return True if only the pass for linear layers applies to an operator."""
    name = getattr(node.target, "__name__", "")
    arguments: tuple[Any, ...] = node.args
    return name in PLAIN or (name == "aten.cat.default" and len(arguments[0]) <= LONGEST_CAT)


def _linear_only(spec: DelegationSpec) -> DelegationSpec:
    return DelegationSpec(spec.backend_id, [*spec.compile_specs, LINEAR_ONLY])


#: Operators that the delegate serializes as a reshape.
_RESHAPES = ("aten.squeeze_copy.dim", "aten.unsqueeze_copy.default")

#: A unit of execution: one operator, or the index of a group.
Step = Node | int


class AcyclicXnnpackPartitioner(XnnpackPartitioner):
    """Use upstream's partitions if they can run one after the other, else `partitions_by_level`."""

    def generate_partitions(self, ep: ExportedProgram) -> list[Partition]:
        """Return partitions without circular dependencies."""
        matched = [group for group in self.get_matched_nodes_from_configs(ep) if all(map(is_serialisable, group))]
        partitions = generate_grouped_partitions_from_list_of_nodes(ep.graph_module, matched)
        return partitions_by_level(ep.graph, matched) if has_cycle(ep.graph, partitions) else partitions

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Partition a program."""
        # Not `XnnpackPartitioner.partition`, which warns about decomposed operators unless a certain function calls it.
        return skip_unneeded_passes(ConfigerationBasedPartitioner.partition(self, exported_program))

    def kept_operators(self, programs: Iterable[ExportedProgram]) -> list[OpOverload] | None:
        """Return the operators that a lowering must not decompose, because the delegate takes them.

        Returns:
            None if the delegate takes some calls of an operator but not all, which must then be decided per call.
        """
        kept: set[OpOverload] = set()
        others: set[OpOverload] = set()
        for program in programs:
            offered, takes = self.ops_to_not_decompose(program)
            for node in program.graph.nodes:
                if node.target in offered:
                    (kept if takes is None or takes(node) else others).add(node.target)
        return None if kept & others else list(kept)


def is_serialisable(node: Node) -> bool:
    """Return True if XNNPACK can serialize an operator.

    A reshape may have one dynamic size at most. A maximum is one of rows or columns of images, which it keeps (1.4.1):
    the partitioner takes others, and the compiler fails.
    """
    name = getattr(node.target, "__name__", None)
    if name == "aten.max.dim":
        return node.args[1:] in ((2, True), (3, True))
    if name not in _RESHAPES:
        return True
    return sum(isinstance(size, torch.SymInt) for size in node.meta["val"].shape) <= 1


def has_cycle(graph: Graph, partitions: Sequence[Partition]) -> bool:
    """Return True if partitions depend on each other in a circle."""
    inputs = _inputs(graph, {node: index for index, partition in enumerate(partitions) for node in partition.nodes})
    try:
        TopologicalSorter(inputs).prepare()
    except CycleError:
        return True
    return False


def partitions_by_level(graph: Graph, groups: Sequence[Sequence[Node]]) -> list[Partition]:
    """Partition a delegate's operators by how often the longest path to them enters or leaves the delegate.

    This level never falls along an edge, and rises where an edge leaves the delegate, so no path returns to a
    partition.

    Args:
        graph: Graph to partition.
        groups: The delegate's operators; those of one group stay together.
    """
    inputs = _inputs(graph, {node: index for index, group in enumerate(groups) for node in group})
    level: dict[Step, int] = {}
    members: dict[int, dict[Node, None]] = {}
    for step in TopologicalSorter(inputs).static_order():
        delegated = isinstance(step, int)
        level[step] = max((level[used] + (isinstance(used, int) is not delegated) for used in inputs[step]), default=0)
        if isinstance(step, int):
            members.setdefault(level[step], {}).update(dict.fromkeys(groups[step]))
    return [Partition(id=index, nodes=nodes) for index, nodes in enumerate(members.values())]


def _inputs(graph: Graph, number_of: Mapping[Node, int]) -> dict[Step, set[Step]]:
    """Return the dependencies of each step; nodes with an index in `number_of` are one step under it."""
    inputs: dict[Step, set[Step]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":  # Always available; a constant in several partitions is copied to each.
            continue
        step = number_of.get(node, node)
        used = {number_of.get(one, one) for one in node.all_input_nodes if one.op != "placeholder"}
        inputs.setdefault(step, set()).update(used - {step})
    return inputs
