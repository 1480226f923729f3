"""Nothing of a prompt's tokens but the last is computed behind the last layer's attention.

A prompt's logits are those after its last token, but models choose that token before the head, behind the last layer.
What a layer does after attention it does to each token by itself, so the choice is moved up to where tokens last see
each other: of 12 layers a twelfth of most of a prompt's products is left out, and the result is the same.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..common.compat.torch import METADATA_ASSERTION, OpOverload, writes_in_place

if TYPE_CHECKING:
    from torch.export import ExportedProgram


_aten = torch.ops.aten


class _Rows(NamedTuple):
    """A call of which the last row is enough.

    Attributes:
        dim: Where its result has rows.
        operands: Where those of its operands have them that have any.
    """

    dim: int
    operands: dict[Node, int]


def choose_last_token_early(program: ExportedProgram) -> None:
    """Move the last choice of a last row as far up as operators give each row by itself, in place.

    Args:
        program: As torch.export traced it; one without such a choice stays as it is.
    """
    choice = next((node for node in reversed(program.graph.nodes) if _chooses_last(node)), None)
    if choice is None or (choice.target is _aten.slice.Tensor and program.graph.output_node() in choice.users):
        return
    rows = _rows_by_themselves(choice)
    if rows:
        _narrow(choice, rows)
        program.graph_module.recompile()


def _chooses_last(node: Node) -> bool:
    if node.op != "call_function" or node.target not in (_aten.slice.Tensor, _aten.select.int) or node.kwargs:
        return False
    arguments: tuple[Any, ...] = node.args
    shape, (dim, index) = shape_of(arguments[0]), (*arguments[1:3], 0, 0)[:2]
    # Of a slice, to the end, by ones.
    return index == -1 and not is_one(shape[dim % len(shape)]) and arguments[3:] in ((), (sys.maxsize,))


def _rows_by_themselves(choice: Node) -> dict[Node, _Rows]:
    """What nothing but the choice needs, and of which one row can be had from one row, in the graph's order."""
    x: Any = choice.args[0]
    dim: Any = choice.args[1]
    wanted: dict[Node, int] = {x: dim % len(shape_of(x))}
    found: dict[Node, _Rows | None] = {choice: None}
    for node in reversed(choice.graph.nodes):
        if node.op != "call_function" or node not in wanted:
            continue
        if not all(user in found or _is_idle(user) for user in node.users):
            continue
        operands = operands_by_row(node, wanted[node])
        if operands is None or any(wanted.get(operand, place) != place for operand, place in operands.items()):
            continue
        found[node] = _Rows(wanted[node], operands)
        wanted |= operands
    return {
        node: rows
        for node, rows in reversed(found.items())
        # One of several results of a call that stays as it is.
        if rows is not None and (node.target is not operator.getitem or node.args[0] in found)
    }


def _is_idle(node: Node) -> bool:
    """Whether it states what a trace has found, or takes one of several results that nobody reads."""
    return node.target is METADATA_ASSERTION or (node.target is operator.getitem and not node.users)


def _narrow(choice: Node, rows: dict[Node, _Rows]) -> None:
    graph = choice.graph
    last: dict[Node, Node] = {}
    for node, (dim, operands) in rows.items():
        for user in [user for user in node.users if _is_idle(user)]:
            graph.erase_node(user)
        with graph.inserting_before(node):
            for operand, place in operands.items():
                if operand not in last:
                    last[operand] = _call(node, _aten.slice.Tensor, (operand, place, -1, sys.maxsize))
            of_one = functools.partial(_taken, {operand: last[operand] for operand in operands})
            last[node] = _call(node, node.target, *map_arg((arguments_of_one_row(node, dim), node.kwargs), of_one))
    x: Any = choice.args[0]
    choice.replace_input_with(x, last[x])
    if choice.target is _aten.slice.Tensor:
        choice.replace_all_uses_with(last[x])
        graph.erase_node(choice)
    # One by one: calls of dropout stay for `eliminate_dead_code`, though they do nothing.
    for node in reversed(rows):
        graph.erase_node(node)


def _taken(others: dict[Node, Node], operand: Node) -> Node:
    return others.get(operand, operand)


def _call(like: Node, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Node:
    """A call where the graph inserts, said to come from where another does."""
    node = like.graph.call_function(target, arguments, keywords)
    values, named = map_arg((arguments, keywords or {}), lambda operand: operand.meta["val"])
    node.meta = {**like.meta, "val": target(*values, **named)}
    return node


#: Operand -> the dimension of its rows, of those that have any: all rows have the same of others.
Operands = dict[Node, int]
#: A node, whose arguments are of any kind.
Call = Any
Rule = Callable[[Call, int], "Operands | None"]
Size = int | torch.SymInt

_aten = torch.ops.aten


def operands_by_row(node: Call, dim: int) -> Operands | None:
    """Where the operands of a call have the rows that it has at `dim`; None of one that mixes rows, or is not known."""
    target = node.target
    if target is operator.getitem:
        return {node.args[0]: dim}
    if not isinstance(target, OpOverload) or writes_in_place(target):
        return None
    rule = _RULES.get(target)
    if rule is None and (target in _COPIES or torch.Tag.pointwise in target.tags):
        rule = _elementwise
    if rule is None:
        rule = _RULES_BY_NAME.get(target.name())
    return None if rule is None else rule(node, dim)


def arguments_of_one_row(node: Call, dim: int) -> tuple[Any, ...]:
    """Arguments of a call whose result is to have one row at `dim`: sizes are among them."""
    if node.target not in _RESHAPES:
        return node.args
    sizes = list(node.args[1])
    sizes[dim] = 1
    return (node.args[0], sizes, *node.args[2:])


def shape_of(node: Call) -> tuple[Size, ...]:
    """Of what a call gives, of the first of several; of a number, as of a tensor of one, nothing."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_same(one: Size, other: Size) -> bool:
    """Whether two sizes are known to be equal; asking torch would make it so."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return one.node.expr == other.node.expr


def is_one(size: Size) -> bool:
    """Whether it is 1, for sure."""
    return isinstance(size, int) and size == 1


def _elementwise(node: Call, dim: int) -> Operands | None:
    shape = shape_of(node)
    found: Operands = {}
    for operand in node.all_input_nodes:
        own = shape_of(operand)
        place = dim - (len(shape) - len(own))
        if place < 0 or (is_one(own[place]) and not is_one(shape[dim])):
            continue
        if is_same(own[place], shape[dim]):
            found[operand] = place
        else:
            return None
    return found


def _linear(node: Call, dim: int) -> Operands | None:
    """`linear(x [..., rows, features], weight, bias)`: features are mixed, and nothing else."""
    x = node.args[0]
    if dim == len(shape_of(node)) - 1:
        return None
    return {x: dim}


def _product(place: int) -> Rule:
    """`mm(x [rows, features], weight)`, with x at this place among the arguments."""

    def rule(node: Call, dim: int) -> Operands | None:
        x = node.args[place]
        # What is added may have a row for each.
        is_plain = all(len(shape_of(added)) < 2 for added in node.args[:place])
        if dim != 0 or node.args.count(x) > 1 or not is_plain:
            return None
        return {x: 0}

    return rule


def _matmul(node: Call, dim: int) -> Operands | None:
    """`x [..., rows, features] @ weight [features, outputs]`."""
    x, weight = node.args
    if x is weight or len(shape_of(weight)) != 2 or dim == len(shape_of(node)) - 1:
        return None
    return {x: dim}


def _in_blocks(place: int) -> Rule:
    """What is quantised in blocks, whose sizes are the argument at this place; scales are [..., rows]."""

    def rule(node: Call, dim: int) -> Operands | None:
        block, rows = node.args[place], shape_of(node)[dim]
        operands = node.all_input_nodes
        of_rows = all(dim < len(shape_of(one)) and is_same(shape_of(one)[dim], rows) for one in operands)
        return dict.fromkeys(operands, dim) if of_rows and block[dim] == 1 else None

    return rule


def _normalised(node: Call, dim: int) -> Operands | None:
    """Over the last dimensions, whose sizes are the second argument."""
    x, sizes = node.args[:2]
    if dim >= len(shape_of(x)) - len(sizes):
        return None
    return {x: dim}


def _reduced(node: Call, dim: int) -> Operands | None:
    """Over the dimensions that are the second argument, which stay as ones or go."""
    x, dims, *rest = node.args
    size = len(shape_of(x))
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    gone = {one % size for one in dims}
    keeps = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
    left = [one for one in range(size) if keeps or one not in gone]
    return None if left[dim] in gone else {x: left[dim]}


def _along(place: int, default: int = 0) -> Rule:
    """Along one dimension, the argument at this place, which stays."""

    def rule(node: Call, dim: int) -> Operands | None:
        along = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
        if along % len(shape_of(node)) == dim:
            return None
        # Bounds may be operands, too.
        return {operand: dim for operand in node.all_input_nodes if shape_of(operand)}

    return rule


def _selected(node: Call, dim: int) -> Operands | None:
    x, along, *index = node.args
    along %= len(shape_of(x))
    if any(isinstance(one, Node) for one in index):
        return None
    return {x: dim + (dim >= along)}


def _unsqueezed(node: Call, dim: int) -> Operands | None:
    x, along = node.args
    along %= len(shape_of(node))
    return None if dim == along else {x: dim - (dim > along)}


def _squeezed(node: Call, dim: int) -> Operands | None:
    x, along = node.args
    shape = shape_of(x)
    if not isinstance(along, int):
        return None
    along %= len(shape)
    return {x: dim if len(shape) == len(shape_of(node)) or dim < along else dim + 1}


def _transposed(node: Call, dim: int) -> Operands | None:
    x, *pair = node.args
    one, other = (place % len(shape_of(x)) for place in pair)
    return {x: other if dim == one else one if dim == other else dim}


def _permuted(node: Call, dim: int) -> Operands | None:
    x, order = node.args
    return {x: order[dim] % len(shape_of(x))}


def _reshaped(node: Call, dim: int) -> Operands | None:
    """The rows are a dimension of both, with as much before it: then one row is the same numbers in both."""
    x = node.args[0]
    shape, own = shape_of(node), shape_of(x)
    before = shape[:dim]
    if not all(isinstance(size, int) for size in before):
        return None
    for place, size in enumerate(own):
        if is_same(size, shape[dim]) and not is_one(size):
            if all(isinstance(one, int) for one in own[:place]) and math.prod(own[:place]) == math.prod(before):
                return {x: place}
    return None


_RESHAPES = {_aten.view.default, _aten.reshape.default}
_SPLITS = (_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default, _aten.chunk.default)
_COPIES = {
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.type_as.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.dropout.default,
}
#: Of other libraries, which may not be imported.
_RULES_BY_NAME: dict[str, Rule] = {
    "exportable_cache::quantized_linear": _linear,
    "torchao::choose_qparams_affine": _in_blocks(2),
    "torchao::quantize_affine": _in_blocks(1),
    "torchao::dequantize_affine": _in_blocks(1),
}
_RULES: dict[OpOverload, Rule] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _product(0),
    _aten.addmm.default: _product(1),
    _aten.matmul.default: _matmul,
    _aten.layer_norm.default: _normalised,
    _aten.rms_norm.default: _normalised,
    _aten.mean.dim: _reduced,
    _aten.sum.dim_IntList: _reduced,
    _aten.amax.default: _reduced,
    _aten.softmax.int: _along(1),
    _aten.cat.default: _along(1),
    _aten.slice.Tensor: _along(1),
    **dict.fromkeys(_SPLITS, _along(2)),
    _aten.select.int: _selected,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.squeeze.dim: _squeezed,
    _aten.transpose.int: _transposed,
    _aten.permute.default: _permuted,
    _aten.flatten.using_ints: _reshaped,
    **dict.fromkeys(_RESHAPES, _reshaped),
}
