"""A segment as a program of its own, over weights that are told apart by their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .segments import Segment, Unexplained, place_of_size

if TYPE_CHECKING:
    from torch.export import ExportedProgram

WEIGHT, CONSTANT = "weight_", "constant_"


def segment_program(program: ExportedProgram, segment: Segment) -> ExportedProgram:
    """Trace a segment: its inputs in order, to its outputs; tensors are `weight_N` and `constant_N`.

    Weights have random values in the range of the segment's own, so that no two are equal: where a compiler has put
    each can be told.

    Raises:
        Exception: Whatever torch.export has against it.
    """
    root = nn.Module()
    generator = torch.Generator().manual_seed(0)
    graph = Graph()
    copies: dict[Node, Any] = {}
    for index, node in enumerate(segment.weights):
        name = f"{WEIGHT}{index}"
        root.register_parameter(name, nn.Parameter(_marked(tensor_of(program, node), generator), requires_grad=False))
        copies[node] = graph.get_attr(name)
    for index, node in enumerate(segment.constants):
        root.register_buffer(f"{CONSTANT}{index}", tensor_of(program, node).detach())
        copies[node] = graph.get_attr(f"{CONSTANT}{index}")
    for index, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"input_{index}")

    def copied(node: Node) -> Any:
        if node not in copies:
            index, dim = map(int, place_of_size(node.meta["val"], segment.inputs).split("."))
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (copies[segment.inputs[index]], dim))
        return copies[node]

    for node in segment.nodes:
        arguments, keywords = map_arg((node.args, node.kwargs), copied)
        copies[node] = graph.call_function(node.target, arguments, keywords)
    graph.output(tuple(copies[node] for node in segment.outputs))
    # Read before the first use, as a trace would.
    graph.lint()
    values = [node.meta["val"] for node in segment.inputs]
    examples = tuple(torch.zeros([_example(size) for size in value.shape], dtype=value.dtype) for value in values)
    dims: dict[str, Dim] = {}
    shapes = tuple(
        {index: _dim(size, program, dims) for index, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
        for value in values
    )
    traced = torch.export.export(
        GraphModule(root, graph),
        examples,
        dynamic_shapes=shapes,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    _check_sizes(segment, traced)
    return traced


def _check_sizes(segment: Segment, traced: ExportedProgram) -> None:
    """Refuse a trace that took a size for its example's: torch.export does so with sizes of one."""
    placeholders = {node.name: node for node in traced.graph.find_nodes(op="placeholder")}
    for node, name in zip(segment.inputs, traced.graph_signature.user_inputs, strict=True):
        found = placeholders[name].meta["val"].shape
        for size, other in zip(node.meta["val"].shape, found, strict=True):
            if isinstance(size, torch.SymInt) and not isinstance(other, torch.SymInt):
                raise Unexplained(f"size {size} of {name} was taken for {other}")


def tensor_of(program: ExportedProgram, node: Node) -> torch.Tensor:
    """Values of a parameter, buffer or constant of a program."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    name = names[node.name]
    return program.state_dict[name] if name in program.state_dict else program.constants[name]


def _marked(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, generator=generator).add(0.5).to(tensor.dtype)
    return torch.randint(
        int(tensor.min()), int(tensor.max()) + 1, tensor.shape, generator=generator, dtype=tensor.dtype
    )


def _example(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _dim(size: torch.SymInt, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    """A size of the program, or a multiple of one and a constant; what else there is, is left to torch.export."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1 or not expression.is_polynomial(*symbols) or expression.diff(symbols[0]).free_symbols:
        return Dim.AUTO
    (symbol,) = symbols
    if str(symbol) not in dims:
        limits = program.range_constraints[symbol]
        dims[str(symbol)] = Dim(str(symbol), min=int(limits.lower), max=int(limits.upper))
    factor, offset = int(expression.diff(symbol)), int(expression.subs(symbol, 0))
    dim = dims[str(symbol)]
    dim = dim if factor == 1 else factor * dim
    return dim + offset if offset else dim
