"""Which operators give each row of tokens from the same row of their operands, whatever the other rows hold.

Of such an operator the last row can be had from the last rows alone. A rule says at which dimension each operand has
the rows, for an operator whose result has them at a given one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...common.compat.torch import OpOverload, writes_in_place

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
