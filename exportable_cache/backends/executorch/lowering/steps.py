"""Native operators for the steps between linear layers: `rms_norm`, `rotate`, `gate`, and conversions to 16 bits.

A delegate passes over memory once for each elementary operator of these steps: twenty times per layer for the norms and
rotations of queries and keys, which takes a fifth of the time of a prompt. A native operator passes once. ExecuTorch
converts new keys and values to 16 bits in one thread.
`kernels/src/elementwise.h` states what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ....common.compat.torch import METADATA_ASSERTION, OpOverload, gives_views, writes_in_place
from ..graph_edits import insert_call, replace_call
from ..native.linears import define_operator
from .rewrites import rotated_halves

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

_ATEN = torch.ops.aten
_ADD, _MULTIPLY = _ATEN.add.Tensor, _ATEN.mul.Tensor
_CONVERSIONS = (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.type_as.default)
#: Factors `first` and `third` of `gate`. GELU by tanh is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
_SILU = (1.0, 0.0)
_TANH_GELU = (2 * sqrt(2 / pi), 2 * sqrt(2 / pi) * 0.044715)


def rms_norm(source: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Compute `source * rsqrt(mean(source**2, -1) + epsilon) * weight` in plain operators.

    Args:
        source: float32 [..., size].
        weight: float32 [size], or None for ones.
        epsilon: Added to the mean.
    """
    normalized = source * torch.rsqrt(source.pow(2).mean(-1, keepdim=True) + epsilon)
    return normalized if weight is None else normalized * weight


def rotate(source: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    """Rotate queries or keys by their positions in plain operators.

    Args:
        source: float32 [batch, heads, tokens, dim], or [batch, tokens, heads, dim].
        cos: float32 [batch or 1, 1, tokens, dim].
        sin: float32, of the same shape.
        tokens_first: True for the second shape of `source`.

    Returns:
        float32 [batch, heads, tokens, dim].
    """
    source = source.transpose(1, 2) if tokens_first else source
    low, high = source.chunk(2, dim=-1)
    return (source * cos + torch.cat([-high, low], dim=-1) * sin).contiguous()


def gate(source: torch.Tensor, factor: torch.Tensor, first: float, third: float) -> torch.Tensor:
    """Compute `source * sigmoid(source * (first + third * source**2)) * factor` in plain operators."""
    # Without a third power if its factor is 0, because 0 times infinity is not a number.
    slope = first + third * source * source if third else first
    return source * torch.sigmoid(source * slope) * factor


def _narrowed(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the conversion of float32 to a dtype, in plain operators."""
    return lambda source: source.to(dtype, memory_format=torch.contiguous_format)


def _like_source(source: torch.Tensor, *others: object) -> torch.Tensor:
    return source.new_empty(source.shape)


def _rotated(source: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    batch, heads, tokens, dim = source.shape
    return source.new_empty(batch, *((tokens, heads) if tokens_first else (heads, tokens)), dim)


define_operator("rms_norm", "(Tensor source, Tensor? weight, float epsilon", rms_norm, _like_source)
define_operator("rotate", "(Tensor source, Tensor cos, Tensor sin, bool tokens_first", rotate, _rotated)
for _name, _dtype in (("to_float16", torch.float16), ("to_bfloat16", torch.bfloat16)):
    define_operator(_name, "(Tensor source", _narrowed(_dtype), _narrowed(_dtype))
_NARROW: dict[torch.dtype | None, Any] = {
    torch.float16: torch.ops.exportable_cache.to_float16.default,
    torch.bfloat16: torch.ops.exportable_cache.to_bfloat16.default,
}
define_operator("gate", "(Tensor source, Tensor factor, float first, float third", gate, _like_source)


#: An operator and its arguments.
_Found = tuple[Any, tuple[Any, ...]]


def steps_to_native(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each float32 RMS norm, rotation, gate and conversion to 16 bits as a native operator, in place."""
    graph = program.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    memory, writes = _shared_memory(graph)
    # From the end, because a norm with a weight contains one without. Nothing reads that one afterwards, as conversions
    # that are not read, and checks of what every node states, are erased.
    for node in reversed(list(graph.nodes)):
        if node.target is METADATA_ASSERTION or (node.target in _CONVERSIONS and not node.users):
            graph.erase_node(node)
            continue
        found = next(filter(None, (match(node) for match in _MATCHES)), None) if node.users else None
        if found is None or _is_changed(node, found[1], order, memory, writes):
            continue
        with graph.inserting_before(node):
            result = insert_call(graph, found[0], *found[1])
        result.meta = {**node.meta, "val": result.meta["val"]}
        replace_call(node, result)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _shared_memory(graph: Graph) -> tuple[dict[Node, Node], list[tuple[Node, Node]]]:
    """Return the first node of the memory of each node, and the calls that change memory, with its first node."""
    memory: dict[Node, Node] = {}
    writes = []
    for node in graph.nodes:
        memory[node] = node
        if not isinstance(node.target, OpOverload):
            if node.target is getitem:
                memory[node] = memory[node.args[0]]
            continue
        given = [memory[one] for one in node.all_input_nodes]
        # The schemas of conversions do not say that they may return their argument.
        if given and (gives_views(node.target) or node.target in _CONVERSIONS):
            memory[node] = given[0]
        if writes_in_place(node.target):
            writes += [(node, one) for one in given]
    return memory, writes


def _is_changed(
    node: Node,
    arguments: tuple[Any, ...],
    order: dict[Node, int],
    memory: dict[Node, Node],
    writes: list[tuple[Node, Node]],
) -> bool:
    """Return True if a call between the parts of a pattern changes what one of them reads.

    Args:
        node: Last part of the pattern.
        arguments: Arguments of the native operator, where the pattern begins.
        order: Indices of all nodes.
        memory: See `_shared_memory`.
        writes: See `_shared_memory`.
    """
    if not writes:
        return False
    ends = {one for one in arguments if isinstance(one, Node)}
    parts, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in parts and source not in ends and source in order:
                parts.add(source)
                waiting.append(source)
    start = min(order[part] for part in parts)
    held = {memory[part] for part in parts | ends if part in memory}
    return any(start < order[call] < order[node] and one in held for call, one in writes)


def _dtype_of(node: Any) -> torch.dtype | None:
    """Return the dtype of a node that is one tensor, else None."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_float(node: Any) -> bool:
    return _dtype_of(node) == torch.float32


def _operand(node: Any) -> Any:
    """Return what a conversion to the same type converts, or the node itself."""
    while isinstance(node, Node) and node.target in _CONVERSIONS and _is_float(node) and _is_float(node.args[0]):
        node = node.args[0]
    return node


def _call(node: Any, target: object, *keywords: str) -> tuple[Any, ...]:
    """Return the arguments of a call of the target, without conversions to the same type; empty for other calls.

    Calls with keyword arguments, such as the factor of a sum, are other calls, except for `keywords`.
    """
    node = _operand(node)
    is_call = isinstance(node, Node) and node.target is target and node.kwargs.keys() <= set(keywords)
    return tuple(map(_operand, node.args)) if is_call else ()


def _both(node: Any, target: object) -> tuple[tuple[Any, Any], ...]:
    """Return the operands of a sum or a product in both orders."""
    first, second = (_call(node, target) + (None, None))[:2]
    return ((first, second), (second, first))


def _norm(node: Node) -> _Found | None:
    for normalized, weight in (*_both(node, _MULTIPLY), (node, None)):
        for source, factor in _both(normalized, _MULTIPLY):
            epsilon = _epsilon(source, factor)
            if epsilon is None or (weight is not None and not _is_row_of(weight, source)):
                continue
            return torch.ops.exportable_cache.rms_norm.default, (source, weight, epsilon)
    return None


def _epsilon(source: Any, factor: Any) -> float | None:
    """Return what is added to the mean if the factor is that of a norm of the source, or None."""
    if not _is_float(source):
        return None
    for root in _call(factor, _ATEN.rsqrt.default)[:1]:
        for mean, epsilon in _both(root, _ADD)[:1]:
            square, *dims = _call(mean, _ATEN.mean.dim) or (None,)
            power = _call(square, _ATEN.pow.Tensor_Scalar)
            if dims == [[-1], True] and power == (source, 2) and isinstance(epsilon, (int, float)):
                return float(epsilon)
    return None


def _is_row_of(weight: Any, source: Node) -> bool:
    return _is_float(weight) and tuple(weight.meta["val"].shape) == tuple(source.meta["val"].shape[-1:])


def _rotation(node: Node) -> _Found | None:
    for plain, rotated in _both(node, _ADD):
        for halves, sin in _both(rotated, _MULTIPLY):
            source = _operand(rotated_halves(halves)) if _is_float(halves) else None
            for known, cos in _both(plain, _MULTIPLY):
                if source is None or known is not source or not (_is_angle(cos, source) and _is_angle(sin, source)):
                    continue
                if cos.meta["val"].shape != sin.meta["val"].shape or source.meta["val"].shape[-1] % 2:
                    continue
                views = _call(source, _ATEN.transpose.int)
                tokens_first = views[1:] == (1, 2)
                arguments = (views[0] if tokens_first else source, cos, sin, tokens_first)
                return torch.ops.exportable_cache.rotate.default, arguments
    return None


def _is_angle(node: Any, source: Node) -> bool:
    """Return True for a cosine or sine [batch or 1, 1, tokens, dim]."""
    if not _is_float(node):
        return False
    sizes, wanted = node.meta["val"].shape, source.meta["val"].shape
    return len(sizes) == len(wanted) == 4 and sizes[0] in (1, wanted[0]) and sizes[1] == 1 and sizes[2:] == wanted[2:]


def _gate(node: Node) -> _Found | None:
    for activation, factor in _both(node, _MULTIPLY):
        silu, gelu = _call(activation, _ATEN.silu.default), _call(activation, _ATEN.gelu.default, "approximate")
        is_tanh = bool(gelu) and _operand(activation).kwargs.get("approximate") == "tanh"
        if not (silu or is_tanh) or not _is_float(factor):
            continue
        source = (silu or gelu)[0]
        if _is_float(source) and source.meta["val"].shape == factor.meta["val"].shape:
            return torch.ops.exportable_cache.gate.default, (source, factor, *(_SILU if silu else _TANH_GELU))
    return None


def _narrowing(node: Node) -> _Found | None:
    operator = _NARROW.get(_dtype_of(node))
    source: Any = node.args[0] if operator and node.target in _CONVERSIONS else None
    return (operator, (source,)) if _is_float(source) else None


_MATCHES = (_norm, _rotation, _gate, _narrowing)
