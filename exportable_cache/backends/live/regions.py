"""Split a captured graph into regions, one per layer, whose text says which are equal."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from ...common.compat.torch import OpOverload, writes_in_place
from ...common.compat.torch_compile import FakeTensor, free_symbols, storage_of, symbol_range
from ...common.tensors import kind_of_tensor

#: Types of nodes that are sizes or computed from sizes.
SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)


def value_of(node: Node) -> Any:
    """Return what TorchDynamo or `torch.export` has recorded for a node: a fake tensor, a size, or several."""
    return node.meta.get("example_value", node.meta.get("val"))


def compute_local_sizes(runs: Sequence[list[Node]], graph: Graph) -> None:
    """Recompute in each run the sizes that it reads, so that no size passes from run to run.

    Runs with the same operators then have the same text.

    Args:
        runs: Consecutive runs of all operators of the graph, changed in place. A run of sizes only becomes empty.
        graph: The graph, changed in place.
    """
    for nodes in runs:
        if nodes:
            _compute_local_sizes(nodes, graph)
    for nodes in reversed(runs):
        for node in reversed(list(nodes)):
            if isinstance(value_of(node), SIZES) and not node.users:
                graph.erase_node(node)
                nodes.remove(node)


def _compute_local_sizes(nodes: list[Node], graph: Graph) -> None:
    first, members = nodes[0], set(nodes)
    copies: dict[Node, Node] = {}

    def can_begin(source: Node) -> bool:
        if isinstance(value_of(source), SIZES):
            return all(map(can_begin, source.all_input_nodes))
        return source not in members

    def local(source: Node) -> Node:
        if source.op == "placeholder" or not isinstance(value_of(source), SIZES) or not can_begin(source):
            return source
        if source not in copies:
            for needed in source.all_input_nodes:
                local(needed)
            with graph.inserting_before(first):
                copies[source] = graph.node_copy(source, local)
        return copies[source]

    for node in list(nodes):
        if not isinstance(value_of(node), SIZES):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), local)
    nodes[:0] = copies.values()


#: A module name up to a layer's index.
_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_SYMBOL = re.compile(r"\b[su]\d+\b")
#: Operators that change a mode for the operators after them, so a graph with them cannot be split.
_MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph that can be compiled alone.

    Attributes:
        nodes: Its operators, in the order of the graph.
        inputs: Values of other regions and inputs of the graph that it reads.
        outputs: Values of `nodes` that others read.
        text: The operators as text, equal for equal regions.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    text: str

    def module(self, root: GraphModule) -> GraphModule:
        """Return the region as a module that maps `inputs` to a tuple of `outputs`."""
        graph, copies = Graph(), {}
        for index, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"input_{index}")
            copies[node].meta = dict(node.meta)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return GraphModule(root, graph)

    def examples(self) -> list[Any]:
        """Return fake tensors and symbolic sizes for `inputs`."""
        return [value_of(node) for node in self.inputs]


def regions_of(module: GraphModule, local_sizes: bool = False) -> list[Region]:
    """Split a graph into regions; return [] if no layer repeats or a region cannot be compiled alone.

    Values that several layers read and the first of them computes are moved before the layers, in place.

    Args:
        module: A graph captured by TorchDynamo or `torch.export`, whose tensors are inputs.
        local_sizes: Recompute sizes in each region, so that regions pass only tensors.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") == "_log_api_usage_once":
            graph.erase_node(node)
    names = (getattr(node.target, "__name__", "") for node in graph.nodes)
    if any(node.op in ("get_attr", "call_module") for node in graph.nodes) or any(name in _MODES for name in names):
        return []
    found = _runs(graph)
    if local_sizes:
        # Before hoisting, so that no layer reads a size of the first one.
        compute_local_sizes([nodes for _, nodes in found], graph)
    runs = _hoisted(found, graph)
    if local_sizes:
        compute_local_sizes(runs, graph)
        runs = [nodes for nodes in runs if nodes]
    sizes = _sizes(graph)
    regions = [_region(run, sizes) for run in runs]
    whole = [region for region in regions if region is not None]
    if len(whole) < len(regions) or max(Counter(region.text for region in whole).values(), default=0) < 2:
        return []
    return whole


def _sizes(graph: Graph) -> dict[str, Node]:
    """Return the node of each symbol: a size, or a graph input with the symbol in its shape."""
    sizes = {str(value_of(node)): node for node in graph.nodes if isinstance(value_of(node), torch.SymInt)}
    if any(node.op == "placeholder" for node in sizes.values()):
        return sizes
    # Programs of torch.export have only tensors as inputs.
    for node in graph.find_nodes(op="placeholder"):
        for size in getattr(value_of(node), "shape", ()):
            if isinstance(size, torch.SymInt):
                sizes[str(size)] = node
    return sizes


def layer_of(node: Node) -> str | None:
    """Return the name of the layer that a node belongs to, or None."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        found = _LAYER.match(re.sub(r"\['?(\w+)'?\]", r".\1", path))
        if found is not None:
            return found[1]
    return None


def _runs(graph: Graph) -> list[tuple[str | None, list[Node]]]:
    """Return runs of consecutive operators with the name of their layer, None outside layers."""
    runs: list[tuple[str | None, list[Node]]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        layer = layer_of(node)
        if not runs or runs[-1][0] != layer:
            if layer is not None and len(runs) > 1 and runs[-1][0] is None and runs[-2][0] == layer:
                # Operators without a module between those of one layer belong to the layer.
                runs[-2][1].extend(runs.pop()[1])
            else:
                runs.append((layer, []))
        runs[-1][1].append(node)
    return runs


def _hoisted(runs: list[tuple[str | None, list[Node]]], graph: Graph) -> list[list[Node]]:
    """Move values that the first layer computes for other layers before all layers, and return the runs."""
    run_of = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    first = next((index for index, (layer, _) in enumerate(runs) if layer is not None), len(runs))
    written = {_storage(value_of(node)) for node in _written(graph)}
    moved: set[Node] = set()
    for index, (layer, nodes) in enumerate(runs):
        if layer is None:
            continue
        free: dict[Node, set[Node]] = {}
        for node in nodes:
            before = [source for source in node.all_input_nodes if run_of.get(source) == index and source not in moved]
            elsewhere = (source for source in node.all_input_nodes if source not in before and source not in moved)
            if (
                not _writes(node)
                and all(source in free for source in before)
                and all(run_of.get(source, -1) < first for source in elsewhere)
                and not {_storage(value_of(source)) for source in (node, *node.all_input_nodes)} & written
            ):
                free[node] = {node}.union(*(free[source] for source in before))
        for node, needed in free.items():
            # A layer's result is not moved: only the next layer reads it.
            if any(run_of.get(user, index + 1) not in (index, index + 1) for user in node.users):
                moved |= needed
    if moved:
        start = next(node for node in graph.nodes if run_of.get(node) == first and node not in moved)
        for node in [node for node in graph.nodes if node in moved]:
            start.prepend(node)
    kept = [[node for node in nodes if node not in moved] for _, nodes in runs]
    hoisted = [node for node in graph.nodes if node in moved]
    if first == 0 and hoisted:
        kept.insert(0, hoisted)
    elif hoisted:
        kept[first - 1] += hoisted
    return [nodes for nodes in kept if nodes]


def _region(nodes: Sequence[Node], sizes: dict[str, Node]) -> Region | None:
    """Return a run as a region, None if it cannot be compiled alone."""
    members = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in members)
    symbols = dict.fromkeys(symbol for node in (*inputs, *nodes) for symbol in free_symbols(value_of(node)))
    for symbol in symbols:
        # No node has this symbol as its value: inputs only have expressions of it in their shapes.
        if str(symbol) not in sizes:
            return None
        if sizes[str(symbol)] not in members:
            inputs.setdefault(sizes[str(symbol)])
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    if not all(isinstance(value_of(node), (torch.Tensor, torch.SymInt)) for node in (*inputs, *outputs)):
        return None
    if not outputs and not any(map(_writes, nodes)):
        return None
    storages = Counter(_storage(value_of(node)) for node in inputs)
    if any(storages[_storage(value_of(node))] > 1 for node in _written(nodes)):
        return None
    return Region(tuple(nodes), tuple(inputs), tuple(outputs), _text(nodes, tuple(inputs), outputs))


def _text(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> str:
    names = {node: f"i{index}" for index, node in enumerate(inputs)} | {
        node: f"n{index}" for index, node in enumerate(nodes)
    }
    lines = [f"{names[node]}: {described(value_of(node))}" for node in inputs]
    for node in nodes:
        arguments = map_aggregate(
            (node.args, tuple(node.kwargs.items())), lambda value: names[value] if isinstance(value, Node) else value
        )
        lines.append(f"{node.op} {_name(node.target)} {arguments} {described(value_of(node))}")
    lines.append(", ".join(names[node] for node in outputs))
    text = "\n".join(lines)
    order = {symbol: f"s{index}" for index, symbol in enumerate(dict.fromkeys(_SYMBOL.findall(text)))}
    ranges = {
        order[str(symbol)]: symbol_range(symbol, environment)
        for node in (*inputs, *nodes)
        for symbol, environment in free_symbols(value_of(node)).items()
        if str(symbol) in order
    }
    return _SYMBOL.sub(lambda found: order[found[0]], text) + f"\n{sorted(ranges.items())}"


def _name(target: Any) -> str:
    # The id distinguishes functions of the same name within this process.
    return target if isinstance(target, str) else f"{getattr(target, '__name__', target)} {id(target)}"


def described(value: Any) -> str:
    """Return a text that is equal for values of the same kind. Their numbers do not matter."""
    if isinstance(value, torch.Tensor):
        return " ".join(kind_of_tensor(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    return f"{type(value).__name__} {value}"


def _writes(node: Node) -> bool:
    """Return True if a call may change one of its arguments."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in (operator.setitem, operator.delitem) or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if isinstance(node.target, OpOverload):
        return writes_in_place(node.target)
    is_operator = node.op == "call_function" and not isinstance(node.target, str)
    in_place = name.endswith("_") and not name.endswith("__") or (name.startswith("__i") and name.endswith("__"))
    return in_place or (is_operator and node.target in _AUGMENTED)


_AUGMENTED = {function for name, function in vars(operator).items() if name.startswith("i") and callable(function)} - {
    operator.index,
    operator.indexOf,
    operator.inv,
    operator.invert,
    operator.is_,
    operator.is_not,
    operator.itemgetter,
}


def _written(nodes: Graph | Sequence[Node]) -> Iterator[Node]:
    for node in nodes.nodes if isinstance(nodes, Graph) else nodes:
        if _writes(node):
            yield from (source for source in node.all_input_nodes if isinstance(value_of(source), FakeTensor))


def _storage(value: Any) -> object:
    # Values without a storage are identified by their id.
    return storage_of(value) if isinstance(value, FakeTensor) else id(value)
