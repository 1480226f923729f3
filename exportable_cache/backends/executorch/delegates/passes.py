"""Passes over edge programs that replace operators which several delegates do not take."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ....common.compat.executorch import cast_operator, edge_operator, operator_of
from ..graph_edits import insert_call, replace_call

aten = torch.ops.aten


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
    and multiply by reciprocals. Positions up to a million are exact.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if operator_of(node.target) is not aten.remainder.Scalar or node.meta["val"].is_floating_point():
            continue
        value, divisor = node.args
        with graph.inserting_before(node):
            quotient = _cast(graph, value, torch.float32)
            for operator, argument in ((aten.mul.Tensor, 1.0 / divisor), (aten.add.Tensor, 0.5 / divisor)):
                quotient = insert_call(graph, edge_operator(operator), quotient, _number(graph, argument, quotient))
            whole = _cast(graph, insert_call(graph, edge_operator(aten.floor.default), quotient), torch.int64)
            product = insert_call(graph, edge_operator(aten.mul.Tensor), whole, _number(graph, divisor, whole))
            replace_call(node, insert_call(graph, edge_operator(aten.sub.Tensor), value, product))
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
