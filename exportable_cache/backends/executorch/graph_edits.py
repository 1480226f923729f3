"""What rewriting an exported graph takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def constant_of(program: ExportedProgram, node: Any) -> Any:
    """The value of an argument of a call, None where it depends on an input, a parameter or a buffer that is written to."""
    if not isinstance(node, Node):
        return node
    signature = program.graph_signature
    if node.op == "placeholder":
        name = signature.inputs_to_buffers.get(node.name, signature.inputs_to_lifted_tensor_constants.get(node.name))
        return None if name in signature.buffers_to_mutate.values() else {**program.state_dict, **program.constants}.get(name)
    if any(constant_of(program, source) is None for source in node.all_input_nodes):
        return None
    arguments, keywords = map_arg((node.args, node.kwargs), lambda source: constant_of(program, source))
    return node.target(*arguments, **keywords)


def insert_call(graph: Graph, operator: torch._ops.OpOverload, *arguments: Any) -> Node:
    """A call of an operator where the graph inserts, with the value that it has for the values of its arguments."""
    node = graph.call_function(operator, arguments)
    node.meta["val"] = operator(*(argument.meta["val"] if isinstance(argument, Node) else argument for argument in arguments))
    return node
