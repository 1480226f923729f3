"""Graph passes before conversion, which replace several operators by one that needs fewer layers of a network.

The numbers are those of the replaced operators: signs and halves are moved, and no other value is rounded.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...common.compat.torch import RESHAPE_COPY, OpOverload, writes_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule

_aten = torch.ops.aten
_RESHAPES = (RESHAPE_COPY, _aten.view.default, _aten.reshape.default)


@torch.library.custom_op("exportable_cache::swapped_halves", mutates_args=())
def swapped_halves(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., dim] with the halves of its last dimension exchanged."""
    return x.roll(x.shape[-1] // 2, dims=-1)


@swapped_halves.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("exportable_cache::shuffled", mutates_args=())
def shuffled(x: torch.Tensor, before: list[int], sizes: list[int], after: list[int]) -> torch.Tensor:
    """Transpose, reshape and transpose again, as TensorRT's SHUFFLE layer does.

    Args:
        x: Any tensor.
        before: Order of the dimensions before the reshape.
        sizes: Sizes of the reshape; -1 for the one that depends on the length.
        after: Order of the dimensions after it.
    """
    return x.permute(before).reshape(sizes).permute(after).clone()


@shuffled.register_fake
def _(x: torch.Tensor, before: list[int], sizes: list[int], after: list[int]) -> torch.Tensor:
    return x.permute(before).reshape(sizes).permute(after)


def simplify(module: GraphModule) -> None:
    """Replace rotations, reciprocal roots, and reshapes next to transpositions; remove repeated operators; in place."""
    graph = module.graph
    for node in list(graph.nodes):
        for replace in (_rotation, _division, _shuffle):
            if replace(graph, node):
                break
    _remove_repeated(graph)
    graph.eliminate_dead_code()
    module.recompile()


def _call(graph: Graph, before: Node, value: Any, target: Any, *args: Any) -> Node:
    """Insert a call with a traced value."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    node.meta = {**before.meta, "val": value}
    return node


def _replace(node: Node, by: Node) -> bool:
    node.replace_all_uses_with(by)
    return True


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target == target


def _value(node: Any) -> Any:
    """Return the traced tensor of a node, or None."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _rotation(graph: Graph, node: Any) -> bool:
    """Replace `x * cos + cat(-x2, x1) * sin` by `x * cos + swapped(x) * (sin with its first half negated)`.

    The second sine is the same for all layers, and negation is exact.
    """
    if not (_is(node, _aten.mul.Tensor) and any(_is(one, _aten.cat.default) for one in node.args)):
        return False
    turned, sine = node.args if _is(node.args[0], _aten.cat.default) else reversed(node.args)
    parts, dim = turned.args[0], turned.args[1] if len(turned.args) > 1 else 0
    made, of_sine = _value(turned), _value(sine)
    if made is None or of_sine is None or len(parts) != 2 or dim not in (-1, made.dim() - 1):
        return False
    if made.dtype != of_sine.dtype or made.shape[-1] != of_sine.shape[-1] or not _is(parts[0], _aten.neg.default):
        return False
    source, half = _half(parts[0].args[0], 1), made.shape[-1] // 2
    if source is None or source is not _half(parts[1], 0) or _value(source).shape[-1] != 2 * half:
        return False
    signed = _call(graph, _after(sine, node), of_sine, NEGATED_FIRST_HALF, sine)
    swapped = _call(graph, node, made, torch.ops.exportable_cache.swapped_halves.default, source)
    return _replace(node, _call(graph, node, _value(node), _aten.mul.Tensor, swapped, signed))


def _after(sine: Any, node: Any) -> Any:
    """Return the node to insert before: what comes after the sine, so that all layers find it equal."""
    return sine.next if sine.op == "call_function" else node


def _half(node: Any, which: int) -> Any:
    """Return the source of a slice of the first or the second half of a last dimension, or None."""
    source = node.args[0] if _is(node, _aten.slice.Tensor) else None
    size = None if _value(source) is None else _value(source).shape[-1]
    if not isinstance(size, int) or size % 2:
        return None
    _, dim, start, end, step = slice_arguments(node.args)
    ends = end is None or end >= size
    fits = (start in (0, None) and end == size // 2) if which == 0 else (start == size // 2 and ends)
    return source if fits and step == 1 and dim in (-1, _value(source).dim() - 1) else None


def slice_arguments(args: Sequence[Any]) -> list[Any]:
    """Return source, dimension, start, end and step of `aten.slice`, of which the last ones may be absent."""
    return [*args, *(None, 0, None, None, 1)[len(args) :]]


@torch.library.custom_op("exportable_cache::negated_first_half", mutates_args=())
def negated_first_half(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., dim] with the first half of its last dimension negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


@negated_first_half.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


NEGATED_FIRST_HALF = torch.ops.exportable_cache.negated_first_half.default


def _division(graph: Graph, node: Any) -> bool:
    """Replace `x * (1 / sqrt(y))` by `x / sqrt(y)`, which rounds once instead of twice."""
    if not _is(node, _aten.mul.Tensor):
        return False
    for source, factor in (node.args, node.args[::-1]):
        root = factor.args[1] if _is(factor, _aten.div.Tensor) and factor.args[0] == 1 else None
        value = _value(source)
        if _is(root, _aten.sqrt.default) and value is not None and value.dtype == _value(root).dtype:
            return _replace(node, _call(graph, node, _value(node), _aten.div.Tensor, source, root))
    return False


def _shuffle(graph: Graph, node: Any) -> bool:
    """Replace a reshape before or after a transposition by one operator."""
    if _is(node, _aten.permute.default) and isinstance(node.args[0], Node) and node.args[0].target in _RESHAPES:
        reshape, order = node.args[0], list(node.args[1])
        source = reshape.args[0]
        known = _value(source), _sizes(reshape)
        if len(reshape.users) == 1 and None not in known:
            args = (source, list(range(known[0].dim())), known[1], [axis % len(order) for axis in order])
            return _replace(node, _call(graph, node, _value(node), torch.ops.exportable_cache.shuffled.default, *args))
    before: Any = node.args[0] if node.target in _RESHAPES else None
    if _is(before, _aten.clone.default) and len(before.users) == 1:
        before = before.args[0]
    if _is(before, _aten.permute.default) and len(before.users) == 1:
        permute, sizes = before, _sizes(node)
        order = [axis % len(permute.args[1]) for axis in permute.args[1]]
        if sizes is not None and _value(permute.args[0]) is not None:
            args = (permute.args[0], order, sizes, list(range(len(sizes))))
            return _replace(node, _call(graph, node, _value(node), torch.ops.exportable_cache.shuffled.default, *args))
    return False


def _sizes(node: Any) -> list[int] | None:
    """Return the sizes of a node's value with -1 for one that depends on the length; None if two do."""
    value = _value(node)
    if value is None or sum(not isinstance(size, int) for size in value.shape) > 1 or 0 in value.shape:
        return None
    return [size if isinstance(size, int) else -1 for size in value.shape]


def _remove_repeated(graph: Graph) -> None:
    """Remove operators that repeat another one's target and arguments, which layers of a model do with masks."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        # Outputs of the network must be separate tensors.
        is_output = any(user.op == "output" for user in node.users)
        if node.op != "call_function" or is_output or not _is_pure(node.target):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        known = seen.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)


def _is_pure(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, OpOverload) and not writes_in_place(target))


def _frozen(value: Any) -> Any:
    """Return arguments as a key; True, 1 and 1.0 differ."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in sorted(value.items()))
    return (type(value), value if isinstance(value, (Node, int, float, bool, str, type(None))) else repr(value))
