"""Sizes that parts of a graph need: computed in each part, from tensors that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

#: Values of nodes that are sizes, and what is asked of them.
SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)


def value_of(node: Node) -> Any:
    """What TorchDynamo or `torch.export` has seen of a node: a fake tensor, a size, or several."""
    return node.meta.get("example_value", node.meta.get("val"))


def compute_own_sizes(runs: Sequence[list[Node]], graph: Graph) -> None:
    """Have each run begin with the sizes that it reads, in the order in which it does, whoever has computed them: few
    sums and products of sizes of tensors. So no size goes from run to run, and runs that read alike are alike.

    Args:
        runs: All operators of the graph, cut into parts that follow each other; changed in place, as the graph is. One
            that had sizes alone is empty then.
    """
    for nodes in runs:
        if nodes:
            _compute_own_sizes(nodes, graph)
    for nodes in reversed(runs):
        for node in reversed(list(nodes)):
            if isinstance(value_of(node), SIZES) and not node.users:
                graph.erase_node(node)
                nodes.remove(node)


def _compute_own_sizes(nodes: list[Node], graph: Graph) -> None:
    first, members = nodes[0], set(nodes)
    copies: dict[Node, Node] = {}

    def can_begin(source: Node) -> bool:
        if isinstance(value_of(source), SIZES):
            return all(map(can_begin, source.all_input_nodes))
        return source not in members

    def own(source: Node) -> Node:
        if source.op == "placeholder" or not isinstance(value_of(source), SIZES) or not can_begin(source):
            return source
        if source not in copies:
            for needed in source.all_input_nodes:
                own(needed)
            with graph.inserting_before(first):
                copies[source] = graph.node_copy(source, own)
        return copies[source]

    for node in list(nodes):
        if not isinstance(value_of(node), SIZES):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), own)
    nodes[:0] = copies.values()
