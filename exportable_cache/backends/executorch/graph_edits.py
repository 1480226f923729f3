"""Helpers for graph passes over exported programs."""

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

    from ...common.fs.tensor_files import Scratch

#: A file for each smaller weight would cost more than its memory.
_MIN_BYTES_IN_FILES = 1 << 20


def constant_of(program: ExportedProgram, node: Any, state: Collection[str] = ()) -> Any:
    """Return the value of a call's argument, or None if it depends on an input, a parameter or a mutated buffer.

    Buffers in `state` are mutated, too: a program that writes in place does not list them in its signature.
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
    """Add a parameter to the program, before its other inputs."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        return create_constant_placeholder(program, program.graph, name, InputKind.PARAMETER, value)


def packed_weight(
    program: ExportedProgram, weight: Node, pack: Callable[[], torch.Tensor], scratch: Scratch | None = None
) -> Node:
    """Return the packed form of a weight, which is made on the first call.

    It is a parameter, because its values differ between layers that are otherwise equal: see `dedup.segments`.

    Args:
        program: Program to add it to.
        weight: The weight.
        pack: Returns the packed values.
        scratch: Storage of large weights in files; None for memory.
    """
    name = f"{weight.name}_packed"
    known = next((node for node in program.graph.find_nodes(op="placeholder") if node.name == name), None)
    if known is not None:
        return known
    packed = pack()
    if scratch is not None and packed.nbytes >= _MIN_BYTES_IN_FILES:
        packed = scratch.empty(packed.shape, packed.dtype).copy_(packed)
    return add_weight(program, name, packed)


def add_constant(program: ExportedProgram, name: str, value: torch.Tensor, persistent: bool = False) -> Node:
    """Add a buffer to the program, before its other inputs."""
    with program.graph.inserting_before(next(iter(program.graph.nodes))):
        return create_constant_placeholder(program, program.graph, name, InputKind.BUFFER, value, persistent)


def insert_call(graph: Graph, operator: Callable[..., Any], *arguments: Any) -> Node:
    """Insert a call of an operator, with the value it has for the values of its arguments."""
    node = graph.call_function(operator, arguments)
    node.meta["val"] = operator(*map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def replace_call(node: Node, replacement: Node) -> None:
    """Replace the uses of a call by another node, and erase it."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def drop_provenance(graph_module: GraphModule) -> PassResult:
    """Remove the history of nodes (`from_node`), in place, inner graphs included; usable as a pass.

    Every pass copies the history of each node and adds a step: a tenth of an export. ExecuTorch uses it to number
    operators when it makes the edge dialect; nothing reads it afterwards.
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
        program: Program to rewrite.
        name: Prefix of the constants' names; their size is appended.
        operand_of: Returns the operand of a call, or None for calls to keep.
        weight_of: Returns the constant, float32 [outputs, size], for operands whose last dimension has that size.
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
