"""Trace and lower each quantized linear layer as one operator, and look up rows of quantized embedding tables.

A quantized model is exported as `dequantize_affine(integers, ...)` before a plain operator. XNNPACK delegates linear
layers of this form. A table would be dequantized as a whole for every token; ExecuTorch's kernels read single rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import executorch.kernels.quantized  # noqa: F401  registers the kernels, also in the runtime
import torch
from executorch.backends.transforms.utils import get_param_tensor
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...common.compat.executorch import edge_operator, operator_of, register_quantized_operators
from ...models.quantized_rows import is_quantized
from .graph_edits import add_constant, replace_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule


@torch.library.custom_op("exportable_cache::quantized_linear", mutates_args=())
def quantized_linear(source: torch.Tensor, weights: Sequence[torch.Tensor], recipe: str) -> torch.Tensor:
    """Represent a linear layer over quantized weights, and perhaps quantized inputs; never run.

    `UnfoldLinears` replaces it by the operators that it represents.

    Args:
        source: [..., inputs].
        weights: Other tensors that the folded operators read, first the integers [outputs, inputs].
        recipe: Key of the folded operators.
    """
    raise NotImplementedError("exportable_cache::quantized_linear is a placeholder and has no kernel")


@quantized_linear.register_fake
def _(source: torch.Tensor, weights: Sequence[torch.Tensor], recipe: str) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], weights[0].shape[0])


@dataclass(frozen=True)
class _Weight:
    """Index of a weight, in a recipe."""

    index: int


@dataclass(frozen=True)
class _Result:
    """Index of an earlier step's result, in a recipe; -1 is the source."""

    index: int


#: Folded operators in order: target and arguments of each call.
_Recipe = tuple[tuple[Any, tuple], ...]
#: Recipes by key, which is the recipe as text, so that equal layers share one.
_RECIPES: dict[str, _Recipe] = {}

_OPERATOR = torch.ops.exportable_cache.quantized_linear.default
_LINEAR = torch.ops.aten.linear.default
_CHOOSE = torch.ops.torchao.choose_qparams_affine.default
_QUANTIZE = torch.ops.torchao.quantize_affine.default
_DEQUANTIZE = torch.ops.torchao.dequantize_affine.default


def fold_linears(program: ExportedProgram) -> ExportedProgram:
    """Fold each linear layer whose weight is dequantized into one operator, in place."""
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
    """Arguments of a folded call: its input, the other tensors that the folded operators read, and their key."""

    source: Node
    weights: Sequence[Node]
    recipe: str


def folded_call(node: Node) -> FoldedCall | None:
    """Return the arguments of a folded call, or None for other nodes."""
    arguments: tuple[Any, ...] = node.args
    return FoldedCall(*arguments) if node.target is _OPERATOR else None


class IntegerLayer(NamedTuple):
    """A linear layer over 4-bit or 8-bit weights in groups.

    Attributes:
        source: [..., inputs].
        integers: [outputs, inputs], from -2^(bits - 1) to 2^(bits - 1) - 1.
        scale: [outputs, groups].
        zero_point: [outputs, groups], or None.
        bias: [outputs], or None.
        group: Number of weights that share a scale.
        rounds: True if the input is quantized to 8 bits per token, False if it stays in float.
        bits: 4 or 8.
    """

    source: Node
    integers: Node
    scale: Node
    zero_point: Node | None
    bias: Node | None
    group: int
    rounds: bool
    bits: int


def integer_layer(node: Node) -> IntegerLayer | None:
    """Return the 4-bit or 8-bit layer that a folded call represents, or None."""
    call = folded_call(node)
    if call is None:
        return None
    steps = _RECIPES[call.recipe]
    targets = [target for target, _ in steps if target is not operator.getitem]
    rounds = targets == [_CHOOSE, _QUANTIZE, _DEQUANTIZE, _DEQUANTIZE, _LINEAR]
    if not rounds and targets != [_DEQUANTIZE, _LINEAR]:
        return None
    chosen, weight, linear = steps[0][1], steps[-2][1], steps[-1][1]
    if rounds:
        *tokens, block = chosen[2]
        of_tokens = chosen[1] == "ASYMMETRIC" and chosen[3:6] == (torch.int8, -128, 127) and set(tokens) <= {1}
        if not of_tokens or block != call.source.meta["val"].shape[-1]:
            return None
    (one, group), (integers, scale, zero_point), limits = weight[1], (weight[0], *weight[2:4]), weight[4:7]
    bits = {(torch.int8, -8, 7): 4, (torch.int8, -128, 127): 8}.get(limits)
    if one != 1 or bits is None:
        return None
    names = (integers, scale, zero_point, linear[2] if len(linear) > 2 else None)
    parts: list[Any] = [call.weights[name.index] if isinstance(name, _Weight) else None for name in names]
    of_integers, of_scale, of_zero_point, of_bias = parts
    return IntegerLayer(call.source, of_integers, of_scale, of_zero_point, of_bias, group, rounds, bits)


class UnfoldLinears(PassBase):
    """Replace folded calls by their operators, in the edge dialect."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Replace the calls of one graph."""
        graph = graph_module.graph
        calls = [node for node in graph.nodes if operator_of(node.target) is _OPERATOR]
        for call in calls:
            with graph.inserting_before(call):
                replace_call(call, _unfold(call))
        if calls:
            graph_module.recompile()
        return PassResult(graph_module, bool(calls))


def _folded(linear: Node) -> tuple[Node, list[Node], _Recipe] | None:
    """Return source, weights and recipe of a layer, or None if its weights are not all constants."""
    steps = list(dict.fromkeys(_steps(linear)))
    chosen = next((step for step in steps if step.target is _CHOOSE), None)
    operands: tuple[Any, ...] = linear.args
    source: Any = operands[0] if chosen is None else chosen.args[0]
    # The integers come first, because the fake kernel reads the number of outputs from them.
    integers: Node = operands[1].args[0]
    read = (value for step in steps for value in step.all_input_nodes if value not in steps and value is not source)
    weights = list(dict.fromkeys((integers, *read)))
    if any(weight.op != "placeholder" for weight in weights) or any(step.kwargs for step in steps):
        return None
    names: dict[Node, _Weight | _Result] = {weight: _Weight(index) for index, weight in enumerate(weights)}
    names[source] = _Result(-1)
    names |= {step: _Result(index) for index, step in enumerate(steps)}

    def name(value: Any) -> Any:
        return names[value] if isinstance(value, Node) else value

    recipe: Any = tuple((step.target, map_aggregate(step.args, name)) for step in steps)
    return source, weights, recipe


def _steps(node: Node) -> Iterator[Node]:
    """Yield a layer's operators, inputs first."""
    for value in node.all_input_nodes:
        of_choice = _is(value, operator.getitem) and _is(value.args[0], _CHOOSE)
        if of_choice or any(_is(value, target) for target in (_CHOOSE, _QUANTIZE, _DEQUANTIZE)):
            yield from _steps(value)
    yield node


def _unfold(call: Node) -> Node:
    given: tuple[Any, ...] = call.args
    source, weights, key = given
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


#: Tensors of a layer, besides its input.
_PARTS = ("qdata", "scale", "zero_point", "bias")
#: Dimensions of a layer's input [batch, length, features]; layers over other inputs are folded after the trace.
_DIMENSIONS = 3


class _Kind(NamedTuple):
    """A kind of layer that is traced as one operator.

    Attributes:
        parts: Names in `_PARTS` of the operator's tensors, in order.
        recipe: Key of the folded operators.
    """

    parts: tuple[str, ...]
    recipe: str


class FoldedLinears(TorchFunctionMode):
    """Mode in which quantized linear layers are traced as `exportable_cache::quantized_linear`.

    The result is the same as that of `fold_linears` after the trace.

    Args:
        model: Model whose layers are folded; layers that cannot be folded are traced unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._kinds: dict[tuple, _Kind | None] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_quantized(weight := module.weight):
                key = _key(weight, module.bias)
                if key not in self._kinds:
                    self._kinds[key] = _traced(weight, module.bias)

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and is_quantized(args[1]):
            source, weight = args[:2]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            kind = self._kinds.get(_key(weight, bias))
            if kind is not None and source.dim() == _DIMENSIONS and source.dtype == torch.float32:
                tensors = [bias if part == "bias" else getattr(weight, part) for part in kind.parts]
                return torch.ops.exportable_cache.quantized_linear(source, tensors, kind.recipe)
        return func(*args, **kwargs)


def _key(weight: Any, bias: torch.Tensor | None) -> tuple:
    """Return a key that is equal for layers of one recipe, which does not depend on the number of outputs."""
    form = (type(weight), weight.target_dtype, tuple(weight.block_size), weight.dtype, weight.activation_quantization)
    parts = (weight.qdata, weight.scale, weight.zero_point)
    return (*form, bias is None, *((part.dtype, tuple(part.shape[1:])) for part in parts))


def _traced(weight: Any, bias: torch.Tensor | None) -> _Kind | None:
    """Trace and fold one output of a layer."""
    with torch.no_grad():
        layer = _Layer(weight, bias)
        source = torch.zeros((2, *[3] * (_DIMENSIONS - 2), weight.shape[1]))
        program = fold_linears(torch.export.export(layer, (source,)))
    call = folded_call(program.graph.output_node().args[0][0])
    if call is None or call.source.name not in program.graph_signature.user_inputs:
        return None
    parameters = program.graph_signature.inputs_to_parameters
    return _Kind(tuple(parameters[part.name] for part in call.weights), call.recipe)


class _Layer(nn.Module):
    """The first output of a quantized linear layer, whose tensors are parameters."""

    def __init__(self, weight: Any, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._class = type(weight)
        self._form = (weight.target_dtype, weight.block_size, weight.dtype, weight.activation_quantization)
        for name, part in zip(_PARTS, (weight.qdata, weight.scale, weight.zero_point, bias), strict=True):
            first = None if part is None else nn.Parameter(part[:1].detach().clone(), requires_grad=False)
            self.register_parameter(name, first)

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        weight = self._class(self.qdata, self.scale, self.zero_point, *self._form)
        return functional.linear(source, weight, self.bias)


register_quantized_operators()

_INT4 = (-8, 7)


def dequantized_lookups(program: ExportedProgram) -> list[Node]:
    """Return the lookups in dequantized tables."""
    lookups = program.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    dequantize = torch.ops.torchao.dequantize_affine.default
    return [node for node in lookups if isinstance(node.args[0], Node) and node.args[0].target == dequantize]


def fuse_quantized_embeddings(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each lookup in a dequantized table as one operator on the integers, in place.

    Tables are symmetric (no zero points), with one scale per row or per group of a row.

    Raises:
        ValueError: If a table has zero points.
    """
    graph, lookups = program.graph, dequantized_lookups(program)
    for node in lookups:
        found: Any = node.args
        (integers, _, scale, zero_point, _, *limits), indices = found[0].args[:7], found[1]
        if zero_point is not None and bool(get_param_tensor(program, zero_point).any()):
            raise ValueError(f"{integers.name} must have no zero points; quantize it symmetrically")
        operator = torch.ops.quantized_decomposed.embedding_byte.default
        if tuple(limits) == _INT4:
            operator = torch.ops.quantized_decomposed.embedding_4bit.default
            packed = pack_int4(get_param_tensor(program, integers))
            integers = add_constant(program, f"{integers.name}_packed", packed, persistent=True)
        with graph.inserting_before(node):
            fused = graph.call_function(operator, (integers, scale, None, *limits, indices))
        fused.meta = dict(node.meta)
        replace_call(node, fused)
    if lookups:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack two values from -8 to 7 per byte, the first in the high half, as `embedding_4bit` reads them.

    Args:
        integers: int8 [rows, dim], dim even.

    Returns:
        uint8 [rows, dim // 2].
    """
    shifted = (integers + 8).to(torch.uint8)
    return (shifted[:, 0::2] << 4) | shifted[:, 1::2]
