"""One operator for each quantised linear layer while a program is lowered.

torchao traces such a layer as up to five operators of its own in front of a plain one, and each of them is worked out
again, on numbers of symbolic size, by every pass over the graph: 37% of what lowering took. So they are folded into one
operator, whose result's shape is known at once, and unfolded in front of XNNPACK's partitioner, which looks for them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ...common.compat.executorch import edge_operator, operator_of
from .graph_edits import replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule


@torch.library.custom_op("exportable_cache::quantized_linear", mutates_args=())
def quantized_linear(source: torch.Tensor, weights: Sequence[torch.Tensor], recipe: str) -> torch.Tensor:
    """A linear layer over rounded weights, and perhaps over rounded inputs. `UnfoldLinears` puts back what it stands
    for; it is never run.

    Args:
        source: [..., inputs].
        weights: What the folded operators read beside it: the integers [outputs, inputs] first.
        recipe: Key of the folded operators.
    """
    raise NotImplementedError("exportable_cache::quantized_linear stands for other operators and has no kernel")


@quantized_linear.register_fake
def _(source: torch.Tensor, weights: Sequence[torch.Tensor], recipe: str) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], weights[0].shape[0])


@dataclass(frozen=True)
class _Weight:
    """One of the weights, in a recipe."""

    index: int


@dataclass(frozen=True)
class _Result:
    """What an earlier step of a recipe gave; -1 is the source."""

    index: int


#: A call for each folded operator, in order: what is called, and with which arguments.
_Recipe = tuple[tuple[Any, tuple], ...]
#: By key, which is the recipe's text: equal layers share one.
_RECIPES: dict[str, _Recipe] = {}

_OPERATOR = torch.ops.exportable_cache.quantized_linear.default
_LINEAR = torch.ops.aten.linear.default
_CHOOSE = torch.ops.torchao.choose_qparams_affine.default
_QUANTIZE = torch.ops.torchao.quantize_affine.default
_DEQUANTIZE = torch.ops.torchao.dequantize_affine.default


def fold_linears(program: ExportedProgram) -> ExportedProgram:
    """Fold each linear layer whose weight is dequantised, in place; other programs are left as they are."""
    graph = program.graph
    linears = [node for node in graph.find_nodes(op="call_function", target=_LINEAR) if _is(node.args[1], _DEQUANTIZE)]
    for node in linears:
        folded = _folded(node)
        if folded is None:
            continue
        source, weights, recipe = folded
        key = repr(recipe)
        _RECIPES[key] = recipe
        with graph.inserting_before(node):
            call = graph.call_function(_OPERATOR, (source, weights, key))
        call.meta = dict(node.meta)
        replace_call(node, call)
    if graph.find_nodes(op="call_function", target=_OPERATOR):
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


class FoldedCall(NamedTuple):
    """What a call of the operator is given: its input, what the folded operators read beside it, and their key."""

    source: Node
    weights: Sequence[Node]
    recipe: str


def folded_call(node: Node) -> FoldedCall | None:
    """None of a node that is no such call."""
    return FoldedCall(*node.args) if node.target is _OPERATOR else None


class Int4Layer(NamedTuple):
    """A linear layer over weights of 4 bits in groups, its input rounded to 8 bits, each token by itself.

    Attributes:
        source: [..., inputs].
        integers: [outputs, inputs], of -8 to 7.
        scale: [outputs, groups].
        zero_point: [outputs, groups], or None.
        bias: [outputs], or None.
        group: Weights that share a scale.
    """

    source: Node
    integers: Node
    scale: Node
    zero_point: Node | None
    bias: Node | None
    group: int


def int4_layer(node: Node) -> Int4Layer | None:
    """What a call of the operator stands for, if it is such a layer."""
    call = folded_call(node)
    if call is None:
        return None
    steps = _RECIPES[call.recipe]
    if [target for target, _ in steps if target is not operator.getitem] != [
        _CHOOSE, _QUANTIZE, _DEQUANTIZE, _DEQUANTIZE, _LINEAR
    ]:  # fmt: skip
        return None
    chosen, weight, linear = steps[0][1], steps[-2][1], steps[-1][1]
    inputs = call.source.meta["val"].shape[-1]
    *tokens, block = chosen[2]
    of_tokens = chosen[1] == "ASYMMETRIC" and chosen[3:6] == (torch.int8, -128, 127) and set(tokens) <= {1}
    (one, group), (integers, scale, zero_point), limits = weight[1], (weight[0], *weight[2:4]), weight[4:7]
    if not of_tokens or block != inputs or one != 1 or limits != (torch.int8, -8, 7):
        return None
    names = (integers, scale, zero_point, linear[2] if len(linear) > 2 else None)
    parts = [call.weights[name.index] if isinstance(name, _Weight) else None for name in names]
    return Int4Layer(call.source, *parts, group)


class UnfoldLinears(PassBase):
    """Put back, in the edge dialect, what `fold_linears` folded."""

    def call(self, graph_module: GraphModule) -> PassResult:
        graph = graph_module.graph
        calls = [node for node in graph.nodes if operator_of(node.target) is _OPERATOR]
        for call in calls:
            with graph.inserting_before(call):
                replace_call(call, _unfolded(call))
        if calls:
            graph_module.recompile()
        return PassResult(graph_module, bool(calls))


def _folded(linear: Node) -> tuple[Node, list[Node], _Recipe] | None:
    """Source, weights and recipe of a layer; None where its weights are made from more than constants."""
    steps = list(dict.fromkeys(_steps(linear)))
    chosen = next((step for step in steps if step.target is _CHOOSE), None)
    source = linear.args[0] if chosen is None else chosen.args[0]
    # The integers are first: they tell the number of outputs.
    integers = linear.args[1].args[0]
    read = (value for step in steps for value in step.all_input_nodes if value not in steps and value is not source)
    weights = list(dict.fromkeys((integers, *read)))
    if any(weight.op != "placeholder" for weight in weights) or any(step.kwargs for step in steps):
        return None
    names: dict[Node, _Weight | _Result] = {weight: _Weight(index) for index, weight in enumerate(weights)}
    names[source] = _Result(-1)
    names |= {step: _Result(index) for index, step in enumerate(steps)}
    recipe = tuple(
        (step.target, map_aggregate(step.args, lambda value: names[value] if isinstance(value, Node) else value))
        for step in steps
    )
    return source, weights, recipe


def _steps(node: Node) -> Iterator[Node]:
    """A layer's operators, inputs first."""
    for value in node.all_input_nodes:
        of_choice = _is(value, operator.getitem) and _is(value.args[0], _CHOOSE)
        if of_choice or any(_is(value, target) for target in (_CHOOSE, _QUANTIZE, _DEQUANTIZE)):
            yield from _steps(value)
    yield node


def _unfolded(call: Node) -> Node:
    source, weights, key = call.args
    results: list[Node] = []

    def operand(value: Any) -> Any:
        if isinstance(value, _Weight):
            return weights[value.index]
        if isinstance(value, _Result):
            return source if value.index < 0 else results[value.index]
        return value

    for target, arguments in _RECIPES[key]:
        step = call.graph.call_function(edge_operator(target), map_aggregate(arguments, operand))
        step.meta = {name: value for name, value in call.meta.items() if name != "val"}
        step.meta["val"] = target(
            *map_aggregate(step.args, lambda value: value.meta["val"] if isinstance(value, Node) else value)
        )
        results.append(step)
    return results[-1]


def _is(value: Any, target: Any) -> bool:
    return isinstance(value, Node) and value.target is target
