"""Graph pass: after the last attention, compute only the last token of a prompt.

Models select the last token just before the head. After attention, a layer treats each token independently, so the
selection moves up to the last operator that mixes tokens. With 12 layers this saves a twelfth of most matrix products
of a prompt, and the result is equal. Rules say for each operator which dimension of its operands has the rows of
tokens.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..common.compat.torch import METADATA_ASSERTION, OpOverload, writes_in_place

if TYPE_CHECKING:
    from torch.export import ExportedProgram


_aten = torch.ops.aten


class _Rows(NamedTuple):
    """Row dimensions of a call of which only the last row is needed.

    Attributes:
        dim: Row dimension of the result; None if it has none, and is computed again from operands with one row.
        operands: Row dimension of each operand that has rows.
    """

    dim: int | None
    operands: dict[Node, int]


def choose_last_token_early(program: ExportedProgram) -> None:
    """Move the final selection of the last row as far up the graph as possible, in place.

    Args:
        program: Result of torch.export; unchanged if it has no such selection.
    """
    choice = next((node for node in reversed(program.graph.nodes) if _chooses_last(node)), None)
    if choice is None or (choice.target is _aten.slice.Tensor and program.graph.output_node() in choice.users):
        return
    rows = _independent_rows(choice)
    if rows:
        _narrow(choice, rows)
        program.graph_module.recompile()


def _chooses_last(node: Node) -> bool:
    if node.op != "call_function" or node.target not in (_aten.slice.Tensor, _aten.select.int) or node.kwargs:
        return False
    arguments: tuple[Any, ...] = node.args
    shape, (dim, index) = shape_of(arguments[0]), (*arguments[1:3], 0, 0)[:2]
    # A slice must go to the end in steps of 1.
    return index == -1 and not is_one(shape[dim % len(shape)]) and arguments[3:] in ((), (sys.maxsize,))


def _independent_rows(choice: Node, slots: bool = True) -> dict[Node, _Rows]:
    """Return the calls that only the selection uses and that compute each row from the same row, in graph order.

    Args:
        choice: The selection.
        slots: Also take experts by slots, if all of a mixture's calls can be taken.
    """
    x: Any = choice.args[0]
    dim: Any = choice.args[1]
    wanted: dict[Node, int] = {x: dim % len(shape_of(x))}
    found = {choice: _Rows(0, wanted.copy())}
    for node in reversed(choice.graph.nodes):
        index = wanted.get(node)
        users = [user for user in node.users if not _is_idle(user)]
        # A call that reads the result as something else than rows, such as weights, needs it whole.
        is_read_by_row = all(user in found and (index is None or node in found[user].operands) for user in users)
        if node.op != "call_function" or not is_read_by_row or (not slots and _name(node) in _OF_SLOTS):
            continue
        operands = _operands_without_rows(node) if index is None else operands_by_row(node, index)
        if operands is None or any(wanted.get(operand, index) != index for operand, index in operands.items()):
            continue
        found[node] = _Rows(index, operands)
        wanted |= operands
    if slots and not _has_whole_mixtures(found):
        return _independent_rows(choice, slots=False)
    return {
        node: rows
        for node, rows in reversed(found.items())
        # Not one of several results of a call that is unchanged.
        if node is not choice and (node.target is not operator.getitem or node.args[0] in found)
    }


def _is_idle(node: Node) -> bool:
    """Return True for a metadata assertion, or for an unused result of a call with several results."""
    return node.target is METADATA_ASSERTION or (node.target is operator.getitem and not node.users)


def _narrow(choice: Node, rows: dict[Node, _Rows]) -> None:
    graph = choice.graph
    last: dict[Node, Node] = {}
    for node, (dim, operands) in rows.items():
        needed = [one for one in node.all_input_nodes if one in operands or (one in rows and rows[one].dim is None)]
        for user in [user for user in node.users if _is_idle(user)]:
            graph.erase_node(user)
        with graph.inserting_before(node):
            for operand, index in operands.items():
                if operand not in last:
                    last[operand] = _call(node, _aten.slice.Tensor, (operand, index, -1, sys.maxsize))
            of_one = functools.partial(_taken, {operand: last[operand] for operand in needed})
            arguments = node.args if dim is None else arguments_of_one_row(node, dim)
            last[node] = _call(node, node.target, *map_arg((arguments, node.kwargs), of_one))
    x: Any = choice.args[0]
    choice.replace_input_with(x, last[x])
    if choice.target is _aten.slice.Tensor:
        choice.replace_all_uses_with(last[x])
        graph.erase_node(choice)
    # Erased explicitly, because `eliminate_dead_code` keeps calls of dropout.
    for node in reversed(rows):
        graph.erase_node(node)


def _taken(others: dict[Node, Node], operand: Node) -> Node:
    return others.get(operand, operand)


def _call(like: Node, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Node:
    """Insert a call with the metadata of another one."""
    node = like.graph.call_function(target, arguments, keywords)
    values, named = map_arg((arguments, keywords or {}), lambda operand: operand.meta["val"])
    node.meta = {**like.meta, "val": target(*values, **named)}
    return node


#: Operand -> its row dimension; operands without rows are left out.
Operands = dict[Node, int]
#: A node, whose arguments are of any kind.
Call = Any
Rule = Callable[[Call, int], "Operands | None"]
Size = int | torch.SymInt

_aten = torch.ops.aten


def operands_by_row(node: Call, dim: int) -> Operands | None:
    """Return the row dimension of each operand of a call with rows at `dim`; None if it mixes rows or is unknown."""
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
    """Return the arguments of a call, with sizes changed so that its result has one row at `dim`."""
    if node.target not in _RESHAPES:
        return node.args
    sizes = list(node.args[1])
    sizes[dim] = 1
    return (node.args[0], sizes, *node.args[2:])


def shape_of(node: Call) -> tuple[Size, ...]:
    """Return the shape of a call's first result; () for a scalar."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def is_same(one: Size, other: Size) -> bool:
    """Return True if two sizes are known to be equal. Comparing them with `==` would add a guard."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return one.node.expr == other.node.expr


def is_one(size: Size) -> bool:
    """Return True if a size is known to be 1."""
    return isinstance(size, int) and size == 1


def _elementwise(node: Call, dim: int) -> Operands | None:
    shape = shape_of(node)
    found: Operands = {}
    for operand in node.all_input_nodes:
        sizes = shape_of(operand)
        index = dim - (len(shape) - len(sizes))
        if index < 0 or (is_one(sizes[index]) and not is_one(shape[dim])):
            continue
        if is_same(sizes[index], shape[dim]):
            found[operand] = index
        else:
            return None
    return found


def _linear(node: Call, dim: int) -> Operands | None:
    """Apply the rule of `linear(x [..., rows, features], weight, bias)`, which mixes only features."""
    x = node.args[0]
    if dim == len(shape_of(node)) - 1:
        return None
    return {x: dim}


def _experts(node: Call, dim: int) -> Operands | None:
    """Apply the rule of linear layers of experts, whose rows are tokens and perhaps their choices."""
    return {operand: 0 for operand in (*node.args[:1], *node.args[4:6]) if operand is not None} if dim == 0 else None


#: Operators of experts by slots (backends/tensorrt/experts.py). The number of slots depends on the number of tokens.
_SLOTS, _FACTORS, _CHOSEN, _MULTIPLIED = _OF_SLOTS = tuple(
    f"exportable_cache::{name}" for name in ("expert_slots", "slot_factors", "chosen_weights", "slot_product")
)


def _name(node: Call) -> str:
    return node.target.name() if isinstance(node.target, OpOverload) else ""


def _slot_factors(node: Call, dim: int) -> Operands | None:
    """Apply the rule of `slot_factors(indices [tokens, choices], factors [tokens, choices]) [slots, tokens, 1]`."""
    return dict.fromkeys(node.args[:2], 0) if dim == 1 else None


def _slot_product(node: Call, dim: int) -> Operands | None:
    """Apply the rule of `slot_product(source [slots or 1, tokens, inputs], weight)`."""
    return {node.args[0]: 1} if dim == 1 else None


def _operands_without_rows(node: Call) -> Operands | None:
    """Return the operands with rows of a call that chooses slots or their weights, or shapes biases of slots."""
    name = _name(node)
    if name == _SLOTS:
        return {node.args[0]: 0}
    is_bias = node.target is _aten.unsqueeze.default and _name(node.args[0]) == _CHOSEN
    return {} if is_bias or name == _CHOSEN else None


def _has_whole_mixtures(found: Mapping[Node, Any]) -> bool:
    """Return True if all calls of each mixture are found, because tensors with slots of all tokens fit no others."""
    calls: dict[str, list[Call]] = {name: [node for node in found if _name(node) == name] for name in _OF_SLOTS}
    weights = [*(node.args[2] for node in calls[_CHOSEN]), *(node.args[1] for node in calls[_MULTIPLIED])]
    indices = [{node.args[0] for node in calls[name]} for name in (_SLOTS, _FACTORS)]
    return all(one in found for one in weights) and indices[0] == indices[1]


def _product(argument: int) -> Rule:
    """Return the rule of `mm(x [rows, features], weight)`, with x at index `argument`."""

    def rule(node: Call, dim: int) -> Operands | None:
        x = node.args[argument]
        # A summand of two dimensions may have rows too.
        is_plain = all(len(shape_of(added)) < 2 for added in node.args[:argument])
        if dim != 0 or node.args.count(x) > 1 or not is_plain:
            return None
        return {x: 0}

    return rule


def _matmul(node: Call, dim: int) -> Operands | None:
    """Apply the rule of `x [..., rows, features] @ weight [features, outputs]`."""
    x, weight = node.args
    if x is weight or len(shape_of(weight)) != 2 or dim == len(shape_of(node)) - 1:
        return None
    return {x: dim}


def _in_blocks(argument: int) -> Rule:
    """Return the rule of block quantisation with block sizes at index `argument` and scales [..., rows]."""

    def rule(node: Call, dim: int) -> Operands | None:
        block, rows = node.args[argument], shape_of(node)[dim]
        operands = node.all_input_nodes
        of_rows = all(dim < len(shape_of(one)) and is_same(shape_of(one)[dim], rows) for one in operands)
        return dict.fromkeys(operands, dim) if of_rows and block[dim] == 1 else None

    return rule


def _normalised(node: Call, dim: int) -> Operands | None:
    """Apply the rule of normalisation over the last dimensions, whose sizes are the second argument."""
    x, sizes = node.args[:2]
    if dim >= len(shape_of(x)) - len(sizes):
        return None
    return {x: dim}


def _reduced(node: Call, dim: int) -> Operands | None:
    """Apply the rule of a reduction over the dimensions in the second argument."""
    x, dims, *rest = node.args
    size = len(shape_of(x))
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    gone = {one % size for one in dims}
    keeps = bool(rest[0]) if rest else bool(node.kwargs.get("keepdim", False))
    left = [one for one in range(size) if keeps or one not in gone]
    return None if left[dim] in gone else {x: left[dim]}


def _along(argument: int, default: int = 0) -> Rule:
    """Return the rule of an operator along one dimension, which is the argument at this index."""

    def rule(node: Call, dim: int) -> Operands | None:
        along = node.args[argument] if len(node.args) > argument else node.kwargs.get("dim", default)
        if along % len(shape_of(node)) == dim:
            return None
        # Bounds of a slice may be operands without a shape.
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
    one, other = (index % len(shape_of(x)) for index in pair)
    return {x: other if dim == one else one if dim == other else dim}


def _permuted(node: Call, dim: int) -> Operands | None:
    x, order = node.args
    return {x: order[dim] % len(shape_of(x))}


def _reshaped(node: Call, dim: int) -> Operands | None:
    """Apply the rule of a reshape that keeps the row dimension and the number of elements before it."""
    x = node.args[0]
    shape, source = shape_of(node), shape_of(x)
    before = shape[:dim]
    if not all(isinstance(size, int) for size in before):
        return None
    for index, size in enumerate(source):
        if is_same(size, shape[dim]) and not is_one(size):
            if all(isinstance(one, int) for one in source[:index]) and math.prod(source[:index]) == math.prod(before):
                return {x: index}
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
#: Rules for operators of libraries that may not be imported.
_RULES_BY_NAME: dict[str, Rule] = {
    "exportable_cache::quantized_linear": _linear,
    "exportable_cache::expert_linear": _experts,
    "exportable_cache::float8_rounded": _elementwise,
    _FACTORS: _slot_factors,
    _MULTIPLIED: _slot_product,
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
    _aten.topk.default: _along(2, -1),
    _aten.select.int: _selected,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.squeeze.dim: _squeezed,
    _aten.transpose.int: _transposed,
    _aten.permute.default: _permuted,
    _aten.flatten.using_ints: _reshaped,
    **dict.fromkeys(_RESHAPES, _reshaped),
}
