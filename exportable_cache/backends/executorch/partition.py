"""XNNPACK's partitioner, with partitions that never wait for one another in a circle.

ExecuTorch 1.4.1 merges partitions in pairs (exir/backend/canonical_partitioners/group_partitioner.py) and checks each
merger against the operators of the graph, not against what was merged before. Two mergers of operators that have
nothing to do with one another can so come to depend on each other, and lowering ends in "Invalid partition, found
dependency cycles". Rounding keys and values to 8 bits brings that about: a portable kernel takes the largest of each
row, in the middle of what the delegate computes.

It takes operators that only reshape without asking how many of their sizes are dynamic, and fails later where that is
more than one (backends/xnnpack/operators/op_squeeze.py): those are left to the portable kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_grouped_partitions_from_list_of_nodes,
)
from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition

from .needed_passes import with_needed_passes

if TYPE_CHECKING:
    from executorch.exir.backend.partitioner import PartitionResult
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from ...common.compat.torch import OpOverload

#: Operators that the delegate takes for a reshape.
_RESHAPES = ("aten.squeeze_copy.dim", "aten.unsqueeze_copy.default")

#: What runs as a whole: one operator, or those of one number.
Step = Node | int


class AcyclicXnnpackPartitioner(XnnpackPartitioner):
    """Upstream's partitions where they can run one after the other, `partitions_by_level` where not."""

    def generate_partitions(self, ep: ExportedProgram) -> list[Partition]:
        matched = [group for group in self.get_matched_nodes_from_configs(ep) if all(map(is_serialisable, group))]
        partitions = generate_grouped_partitions_from_list_of_nodes(ep.graph_module, matched)
        return partitions_by_level(ep.graph, matched) if has_cycle(ep.graph, partitions) else partitions

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        # Not XNNPACK's own, which says that operators to keep are spelled out unless one certain function calls it.
        return with_needed_passes(ConfigerationBasedPartitioner.partition(self, exported_program))

    def kept_operators(self, programs: Iterable[ExportedProgram]) -> list[OpOverload] | None:
        """The operators that a lowering leaves whole for the delegate.

        Returns:
            None if the delegate takes some calls of one operator and not others: those are to be spelled out.
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
    """Whether XNNPACK has a form for an operator: it reshapes to one dynamic size at most."""
    if getattr(node.target, "__name__", None) not in _RESHAPES:
        return True
    return sum(isinstance(size, torch.SymInt) for size in node.meta["val"].shape) <= 1


def has_cycle(graph: Graph, partitions: Sequence[Partition]) -> bool:
    """Whether some partitions wait for one another."""
    inputs = _inputs(graph, {node: partition.id for partition in partitions for node in partition.nodes})
    try:
        TopologicalSorter(inputs).prepare()
    except CycleError:
        return True
    return False


def partitions_by_level(graph: Graph, groups: Sequence[Sequence[Node]]) -> list[Partition]:
    """A delegate's operators by how often the longest way to them leaves or enters the delegate.

    That number never falls along an edge, and rises where one leaves the delegate: what left a partition never returns
    to it.

    Args:
        graph: To be partitioned.
        groups: The delegate's operators; those of one group go together.
    """
    inputs = _inputs(graph, {node: index for index, group in enumerate(groups) for node in group})
    level: dict[Step, int] = {}
    members: dict[int, dict[Node, None]] = {}
    for step in TopologicalSorter(inputs).static_order():
        delegated = isinstance(step, int)
        level[step] = max((level[used] + (isinstance(used, int) is not delegated) for used in inputs[step]), default=0)
        if delegated:
            members.setdefault(level[step], {}).update(dict.fromkeys(groups[step]))
    return [Partition(id=index, nodes=nodes) for index, nodes in enumerate(members.values())]


def _inputs(graph: Graph, number_of: Mapping[Node, int]) -> dict[Step, set[Step]]:
    """The steps that each waits for: nodes by themselves, but those that have a number under it."""
    inputs: dict[Step, set[Step]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":  # There from the start; a constant in several partitions is copied to each.
            continue
        step = number_of.get(node, node)
        used = {number_of.get(one, one) for one in node.all_input_nodes if one.op != "placeholder"}
        inputs.setdefault(step, set()).update(used - {step})
    return inputs
