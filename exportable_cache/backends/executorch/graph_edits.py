"""What rewriting an exported graph takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassResult

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph


def constant_of(program: ExportedProgram, node: Any, state: Collection[str] = ()) -> Any:
    """The value of an argument of a call, None where it depends on an input, a parameter or a buffer that is written
    to.

    Args:
        state: Names of such buffers that the program's signature does not name, as its graph writes them in place.
    """
    if not isinstance(node, Node):
        return node
    signature = program.graph_signature
    if node.op == "placeholder":
        name = signature.inputs_to_buffers.get(node.name, signature.inputs_to_lifted_tensor_constants.get(node.name))
        return (
            None
            if name in signature.buffers_to_mutate.values() or name in state
            else {**program.state_dict, **program.constants}.get(name)
        )
    if any(constant_of(program, source, state) is None for source in node.all_input_nodes):
        return None
    arguments, keywords = map_arg((node.args, node.kwargs), lambda source: constant_of(program, source, state))
    target: Any = node.target
    return target(*arguments, **keywords)


def add_weight(program: ExportedProgram, name: str, value: torch.Tensor) -> Node:
    """A parameter of the program, before its other inputs."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        return create_constant_placeholder(program, program.graph, name, InputKind.PARAMETER, value)


def packed_weight(program: ExportedProgram, weight: Node, pack: Callable[[], torch.Tensor]) -> Node:
    """A weight in another form, made when it is first asked for.

    A parameter, as what differs between layers that are otherwise equal: see `segments`.
    """
    name = f"{weight.name}_packed"
    known = program.graph.find_nodes(op="placeholder")
    return next((node for node in known if node.name == name), None) or add_weight(program, name, pack())


def add_constant(program: ExportedProgram, name: str, value: torch.Tensor, persistent: bool = False) -> Node:
    """A buffer, before the other inputs."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        return create_constant_placeholder(program, program.graph, name, InputKind.BUFFER, value, persistent)


def insert_call(graph: Graph, operator: Callable[..., Any], *arguments: Any) -> Node:
    """A call of an operator where the graph inserts, with the value that it has for the values of its arguments."""
    node = graph.call_function(operator, arguments)
    node.meta["val"] = operator(*map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def replace_call(node: Node, replacement: Node) -> None:
    """Give a call's uses to another node, and take it out."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def forget_histories(graph_module: GraphModule) -> PassResult:
    """Let go of what nodes were made of, in place, inner graphs included. A pass itself.

    Every pass copies the whole history of each node, one step longer each time: a tenth of an export. ExecuTorch
    numbers operators by them when it makes its dialect; nothing reads them after that.
    """
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("from_node", None)
    return PassResult(graph_module, True)


def calls_to_linear(
    program: ExportedProgram,
    name: str,
    operand_of: Callable[[Node], Node | None],
    weight_of: Callable[[int], torch.Tensor],
) -> ExportedProgram:
    """Rewrite calls as linear layers over a constant, in place, so that they stay inside the XNNPACK delegate.

    Args:
        name: Of the constants, before their size.
        operand_of: What a call is applied to, None of a call that stays.
        weight_of: The constant float32 [outputs, size] for operands of a last dimension.
    """
    graph = program.graph
    weights: dict[int, Node] = {}
    for node in list(graph.nodes):
        operand = operand_of(node)
        if operand is None:
            continue
        size = operand.meta["val"].shape[-1]
        if size not in weights:
            weights[size] = add_weight(program, f"{name}_{size}", weight_of(size))
        with graph.inserting_before(node):
            linear = graph.call_function(torch.ops.aten.linear.default, (operand, weights[size]))
        linear.meta = dict(node.meta)
        replace_call(node, linear)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
