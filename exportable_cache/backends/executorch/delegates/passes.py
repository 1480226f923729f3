"""Passes over exported and edge programs that replace operators which delegates do not take, or compute wrongly."""

from __future__ import annotations

import operator
from math import inf, prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import cast_operator, edge_operator, operator_of
from ...decompositions import gather_by_comparisons, scatter_by_comparisons
from ..graph_edits import insert_call, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

aten = torch.ops.aten

#: Largest integer of 4 bits.
INT4_MOST = 7
#: End of an open slice.
_END = 2**63 - 1
_OF_BITS = {aten.logical_and.default: aten.bitwise_and.Tensor, aten.logical_or.default: aten.bitwise_or.Tensor}
#: Most elements of a vector of float32.
_VECTOR = 16
_FLOOR_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)


def bits_of(integers: torch.Tensor) -> int:
    """Return 4 if signed integers have 4 bits, else 8."""
    return 4 if int(integers.min()) >= -INT4_MOST - 1 and int(integers.max()) <= INT4_MOST else 8


def combine_choices(graph: Graph, results: Node, bias: Node | None, indices: Node, factors: Node | None) -> Node:
    """Insert the end of a linear layer of experts, see `models.experts.expert_linear`.

    Args:
        graph: Graph to insert into.
        results: Products [tokens, choices, outputs].
        bias: [experts, outputs], or None.
        indices: Chosen experts [tokens, choices].
        factors: [tokens, choices], or None for results of each choice.
    """
    if bias is not None:
        chosen = insert_call(graph, aten.embedding.default, bias, indices)
        results = insert_call(graph, aten.add.Tensor, results, chosen)
    if factors is None:
        return results
    results = insert_call(graph, aten.mul.Tensor, results, insert_call(graph, aten.unsqueeze.default, factors, -1))
    return insert_call(graph, aten.sum.dim_IntList, results, [1])


def choices_to_comparisons(program: ExportedProgram) -> ExportedProgram:
    """Compute gathers and scatters along the last dimension by comparisons, as a compiler without either needs it."""
    table = {
        aten.gather.default: gather_by_comparisons,
        aten.scatter.value: scatter_by_comparisons,
        aten.scatter.src: scatter_by_comparisons,
    }
    # Decompositions come after writes in place are replaced.
    called = {*table, aten.scatter_.value, aten.scatter_.src}
    is_needed = any(node.target in called for node in program.graph.nodes)
    return program.run_decompositions(table) if is_needed else program


def slices_to_bounds(program: ExportedProgram) -> ExportedProgram:
    """State both ends of each slice, in place: `x[-length:]` of a length that changes begins at `size - length`."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        arguments: tuple[Any, ...] = node.args
        source, dim, start, end = (*arguments, *(0, None, None)[len(arguments) - 1 :])[:4]
        if isinstance(start, Node) and start.target is operator.neg:
            with graph.inserting_before(node):
                size = insert_call(graph, aten.sym_size.int, source, dim)
                start = insert_call(graph, operator.sub, size, start.args[0])
        node.args = (source, dim, start, _END if end is None else end, *arguments[4:])
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def logic_to_bits(program: ExportedProgram) -> ExportedProgram:
    """Compute logical operators of truth values by those of bits, and `expm1(x)` as `exp(x) - 1`, in place.

    The difference is computed in float32, because 16 bits would leave little of it at small numbers.
    """
    graph = program.graph
    for node in list(graph.nodes):
        arguments = node.args
        with graph.inserting_before(node):
            if node.target is aten.expm1.default:
                dtype = node.meta["val"].dtype
                is_half = dtype in (torch.float16, torch.bfloat16)
                x = insert_call(graph, aten.to.dtype, arguments[0], torch.float32) if is_half else arguments[0]
                found = insert_call(graph, aten.add.Scalar, insert_call(graph, aten.exp.default, x), -1)
                replace_call(node, insert_call(graph, aten.to.dtype, found, dtype) if is_half else found)
            elif node.target in _OF_BITS and all(one.meta["val"].dtype == torch.bool for one in arguments):
                replace_call(node, insert_call(graph, _OF_BITS[node.target], *arguments))
    program.graph_module.recompile()
    return program


def sums_to_dtypes(program: ExportedProgram) -> ExportedProgram:
    """Convert what is summed in another dtype before the sum, in place."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        dtype = node.kwargs.get("dtype")
        if dtype is not None:
            with graph.inserting_before(node):
                node.update_arg(0, insert_call(graph, aten.to.dtype, node.args[0], dtype))
            node.kwargs = {}
    program.graph_module.recompile()
    return program


def maxima_to_parts(program: ExportedProgram) -> ExportedProgram:
    """Compute a maximum and its index by an operator each, in place."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.max.dim):
        with graph.inserting_before(node):
            for part in list(node.users):
                source, dim, *keepdim = node.args
                arguments = ([dim], *keepdim) if part.args[1] == 0 else (dim, *keepdim)
                of_part = aten.amax.default if part.args[1] == 0 else aten.argmax.default
                replace_call(part, insert_call(graph, of_part, source, *arguments))
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def tables_to_selections(program: ExportedProgram) -> ExportedProgram:
    """Index along one dimension by a vector, in place, where the indices have as many dimensions as the tensor.

    MLX's compiler (ExecuTorch 1.4.1) takes those for indices of `take_along_axis`, which gives other elements.
    """
    graph = program.graph
    for node in list(graph.find_nodes(op="call_function", target=aten.index.Tensor)):
        source, indices = node.args
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1 or given[0][1].meta["val"].dim() != source.meta["val"].dim():
            continue
        dim, index = given[0]
        sizes: list[Any] = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        with graph.inserting_before(node):
            if sizes.count(-1) > 1:
                parts = [(index, one) for one in range(index.meta["val"].dim())]
                sides = [(source, one) for one in range(source.meta["val"].dim())]
                parts = sides[:dim] + parts + sides[dim + 1 :]
                sizes = [
                    insert_call(graph, aten.sym_size.int, *part) if size == -1 else size
                    for size, part in zip(sizes, parts, strict=True)
                ]
            vector = insert_call(graph, aten.reshape.default, index, [-1])
            chosen = insert_call(graph, aten.index_select.default, source, dim, vector)
            replace_call(node, insert_call(graph, aten.reshape.default, chosen, sizes))
    program.graph_module.recompile()
    return program


def floor_divisions_to_floors(program: ExportedProgram) -> ExportedProgram:
    """Compute integers divided by a number, and rounded down, by products, in place, see `remainders_to_divisions`."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target not in _FLOOR_DIVISIONS or node.meta["val"].is_floating_point():
            continue
        value, divisor = node.args
        if node.kwargs.get("rounding_mode", "floor") != "floor" or not isinstance(divisor, int):
            continue
        with graph.inserting_before(node):
            first = _quotient(graph, value, divisor)
            rest = insert_call(graph, aten.sub.Tensor, value, insert_call(graph, aten.mul.Scalar, first, divisor))
            found = insert_call(graph, aten.add.Tensor, first, _quotient(graph, rest, divisor))
            replace_call(node, insert_call(graph, aten.to.dtype, found, node.meta["val"].dtype))
    program.graph_module.recompile()
    return program


def _quotient(graph: Any, value: Node, divisor: int) -> Node:
    """Insert a quotient of integers, rounded down, which is some units off if it exceeds four million."""
    quotient = insert_call(graph, aten.to.dtype, value, torch.float32)
    quotient = insert_call(graph, aten.mul.Scalar, quotient, 1.0 / divisor)
    quotient = insert_call(graph, aten.add.Scalar, quotient, 0.5 / abs(divisor))
    return insert_call(graph, aten.to.dtype, insert_call(graph, aten.floor.default, quotient), value.meta["val"].dtype)


def infinite_bounds_to_none(graph_module: GraphModule) -> PassResult:
    """Remove open bounds of `clamp`, in place, because OpenVINO (2025.4.1) reads infinity back from a file as 0."""
    for node in list(graph_module.graph.nodes):
        if operator_of(node.target) is aten.clamp.default:
            value, *bounds = node.args
            kept = [None if one == nothing else one for one, nothing in zip(bounds, (-inf, inf), strict=False)]
            node.args = (value, *kept)
            if all(one is None for one in kept):
                replace_call(node, value)
    graph_module.recompile()
    return PassResult(graph_module, True)


def short_means_to_sums(graph_module: GraphModule) -> PassResult:
    """Compute means of few elements by sums, in place.

    OpenVINO (2025.4.1) takes a mean of squares for a part of an RMS norm, whose kernel ends the process if there are
    fewer elements than a vector has, 16 with AVX-512.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_of(node.target) is not aten.mean.dim:
            continue
        source, dims, *keepdim = node.args
        value = source.meta["val"]
        # Without dimensions, a mean is that of all elements.
        count = prod(value.shape[dim] for dim in (dims or range(value.dim())))
        if isinstance(count, int) and count < _VECTOR and node.meta["val"].dtype == value.dtype:
            with graph.inserting_before(node):
                total = insert_call(graph, edge_operator(aten.sum.dim_IntList), source, dims, *keepdim)
                share = _number(graph, 1.0 / count, total)
                replace_call(node, insert_call(graph, edge_operator(aten.mul.Tensor), total, share))
    graph_module.recompile()
    return PassResult(graph_module, True)


def empties_to_zeros(graph_module: GraphModule) -> PassResult:
    """Replace uninitialized tensors, which some compilers do not take, by zeros, in place."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_of(node.target) is aten.empty.memory_format:
            with graph.inserting_before(node):
                zeros = graph.call_function(
                    edge_operator(aten.full.default), (node.args[0], 0), {"dtype": node.meta["val"].dtype}
                )
            zeros.meta["val"] = node.meta["val"]
            replace_call(node, zeros)
    graph_module.recompile()
    return PassResult(graph_module, True)


def keep_state_outside(program: ExportedProgram, only_split: bool = False) -> None:
    """Remove the buffers that a program writes from the constants of its partitions, in place.

    ExecuTorch (1.4.1, `tag_constant_data`) takes a buffer for written only if the new value is computed from it by a
    single operator. A ring's is a selection from old and new tokens, so the old ones would be zeros in each call.

    Args:
        program: A tagged edge program.
        only_split: True to leave buffers that one partition alone reads and writes, which then are its state. Otherwise
            ExecuTorch would give a buffer to the partition that reads it, and fail at the one that writes it.
    """
    signature = program.graph_signature
    written = {name: value for value, name in signature.buffers_to_mutate.items()}
    nodes = {node.name: node for node in program.graph.nodes}
    for node in program.graph.find_nodes(op="placeholder"):
        value = written.get(signature.inputs_to_buffers.get(node.name))
        if value is None:
            continue
        parts = {one.meta.get("delegation_tag") for one in (*node.users, nodes[value])}
        if not only_split or len(parts) > 1:
            node.meta.pop("delegation_tag", None)


def numbers_to_tensors(graph_module: GraphModule) -> PassResult:
    """Pass the numbers of `where` as tensors, in place."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_of(node.target) in (aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther):
            condition, *values = node.args
            with graph.inserting_before(node):
                tensors = [one if isinstance(one, Node) else _number(graph, one, node) for one in values]
                replace_call(node, insert_call(graph, edge_operator(aten.where.self), condition, *tensors))
    graph_module.recompile()
    return PassResult(graph_module, True)


def remainders_to_divisions(graph_module: GraphModule) -> PassResult:
    """Compute `remainder(x, n)` of integers as `x - n * floor(x / n)`, in place.

    The quotient is computed in float32, half a unit off the border, because delegates divide integers in several ways
    and multiply by reciprocals. Large quotients are some units off then, so the remainder is divided once more. The
    result is exact for divisors up to a million.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_of(node.target) is not aten.remainder.Scalar or node.meta["val"].is_floating_point():
            continue
        value, divisor = node.args
        with graph.inserting_before(node):
            for _ in range(2):
                quotient = _cast(graph, value, torch.float32)
                for operator, argument in ((aten.mul.Tensor, 1.0 / divisor), (aten.add.Tensor, 0.5 / abs(divisor))):
                    quotient = insert_call(graph, edge_operator(operator), quotient, _number(graph, argument, quotient))
                whole = _cast(graph, insert_call(graph, edge_operator(aten.floor.default), quotient), torch.int64)
                product = insert_call(graph, edge_operator(aten.mul.Tensor), whole, _number(graph, divisor, whole))
                value = insert_call(graph, edge_operator(aten.sub.Tensor), value, product)
            replace_call(node, value)
    graph_module.recompile()
    return PassResult(graph_module, True)


def _cast(graph: Any, value: Node, dtype: torch.dtype) -> Node:
    node = graph.call_function(cast_operator(), (value,), {"dtype": dtype})
    node.meta["val"] = value.meta["val"].to(dtype)
    return node


def _number(graph: Any, value: Any, like: Node) -> Node:
    """Insert a number as a tensor with the dtype of a node."""
    node = graph.call_function(edge_operator(aten.full.default), ([], value), {"dtype": like.meta["val"].dtype})
    node.meta["val"] = like.meta["val"].new_full((), value)
    return node
