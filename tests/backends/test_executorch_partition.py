"""Partitions that do not wait for one another, where ExecuTorch's own do."""

import pytest
import torch
from torch.fx import Graph
from torch.fx.passes.infra.partitioner import Partition

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.partition import has_cycle, partitions_by_level  # noqa: E402


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
