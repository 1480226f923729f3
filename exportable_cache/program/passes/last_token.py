"""Nothing of a prompt's tokens but the last is computed behind the last layer's attention.

A prompt's logits are those after its last token, but models choose that token before the head, behind the last layer.
What a layer does after attention it does to each token by itself, so the choice is moved up to where tokens last see
each other: of 12 layers a twelfth of most of a prompt's products is left out, and the result is the same.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ...common.compat.torch import METADATA_ASSERTION
from .token_rows import arguments_of_one_row, is_one, operands_by_row, shape_of

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
