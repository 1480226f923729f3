"""What a program's writes in place leave unsaid in its graph: which operators must stay behind which.

A trace writes to a cache where the model does, and nothing in the graph tells that what reads the cache behind it
depends on it. Making a graph functional says so, and takes as long as tracing it. Where kernels of its own alone touch
a cache, what these declare to write says it, too.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ....common.compat.torch import OpOverload, gives_views, written_arguments

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

_Order = Mapping[Node, Sequence[Node]]


@dataclass(frozen=True)
class StateOrder:
    """The order of what reads and writes the buffers that a program writes to.

    Attributes:
        states: Those buffers.
        behind: Operators that read or write one -> those that must come before them, beside their arguments.
    """

    states: frozenset[Node]
    behind: _Order = field(default_factory=dict)

    def before(self, node: Node) -> Sequence[Node]:
        """What must come before an operator, beside its arguments."""
        return self.behind.get(node, ())

    def restore(self, graph: Graph) -> None:
        """Move what nodes depend on before them; all others keep their order.

        A write to a buffer stays behind the reads that came before it: the runtime writes in place.
        """
        order: dict[Node, None] = {}
        for node in list(graph.nodes):
            pending = [node]
            while pending:
                sources = (*pending[-1].all_input_nodes, *self.before(pending[-1]))
                missing = next((source for source in sources if source not in order), None)
                if missing is not None:
                    pending.append(missing)
                else:
                    order[pending.pop()] = None
        nodes = list(order)
        for before, node in zip(nodes, nodes[1:]):
            before.append(node)


def functional_order(program: ExportedProgram) -> StateOrder:
    """Of a functional program, where all order is in the arguments."""
    buffers = program.graph_signature.inputs_to_buffers
    mutated = set(program.graph_signature.buffers_to_mutate.values())
    return StateOrder(frozenset(node for node in _placeholders(program) if buffers.get(node.name) in mutated))


def traced_order(program: ExportedProgram) -> StateOrder | None:
    """Of a program as it was traced; None where it must be made functional first: it writes to something else than its
    buffers, or an operator of torch's own reads what is written, perhaps through a view.
    """
    if program.graph_signature.buffers_to_mutate:
        # A rewrite has made it functional.
        return functional_order(program)
    buffers = {node for node in _placeholders(program) if node.name in program.graph_signature.inputs_to_buffers}
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    writes: dict[Node, set[Node]] = {}
    for node in calls:
        if isinstance(node.target, OpOverload):
            targets = _written(node, node.target)
            if not targets <= buffers:
                return None
            if targets:
                writes[node] = targets
        elif node.target is not operator.getitem and not isinstance(node.meta.get("val"), _NUMBERS):
            # An operator over graphs, which may write inside of them.
            return None
    states = set().union(*writes.values())
    touching = [node for node in calls if not states.isdisjoint(node.all_input_nodes)]
    if any(node.target.namespace == "aten" or gives_views(node.target) for node in touching):
        return None
    return StateOrder(frozenset(states), _behind(touching, states, writes))


_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def _placeholders(program: ExportedProgram) -> Sequence[Node]:
    return program.graph.find_nodes(op="placeholder")


def _written(node: Node, target: OpOverload) -> set[Node]:
    """Arguments that an operator writes to."""
    found: set[Node] = set()
    for index, name in written_arguments(target):
        map_arg(node.args[index] if index < len(node.args) else node.kwargs.get(name), found.add)
    return found


def _behind(touching: Sequence[Node], states: set[Node], writes: Mapping[Node, set[Node]]) -> _Order:
    """What reads a state is behind the last that wrote it; what writes it, behind all that read it since, too."""
    last: dict[Node, list[Node]] = defaultdict(list)
    readers: dict[Node, list[Node]] = defaultdict(list)
    behind: dict[Node, Sequence[Node]] = {}
    for node in touching:
        before: dict[Node, None] = {}
        for state in states.intersection(node.all_input_nodes):
            before |= dict.fromkeys(last[state])
            if state in writes.get(node, ()):
                before |= dict.fromkeys(readers.pop(state, ()))
                last[state] = [node]
            else:
                readers[state].append(node)
        behind[node] = tuple(before)
    return behind
