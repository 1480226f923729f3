"""Graph passes before conversion, which replace several operators by one that needs fewer layers of a network.

The numbers are those of the replaced operators: signs and halves are moved, and no other value is rounded.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...common.compat.torch import RESHAPE_COPY, TO_COPY, OpOverload, writes_in_place
from ...models import rounding  # noqa: F401  registers the operators
from . import quantized  # noqa: F401  registers the operators

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule

_aten = torch.ops.aten
_RESHAPES = (RESHAPE_COPY, _aten.view.default, _aten.reshape.default)
#: Operators of one tensor that keep what two halves of its last dimension have in common.
_OF_EACH_VALUE = (_aten.cos.default, _aten.sin.default, TO_COPY, _aten.clone.default)
#: Operators of quantized weights, whose arguments have a row for each row of the weight, or are numbers.
_QUANTIZED = (
    torch.ops.exportable_cache.dequantized_weight.default,
    torch.ops.exportable_cache.float8_weight.default,
    torch.ops.exportable_cache.float4_weight.default,
)
#: A number that float32 and the integers of 32 and 64 bits have.
_LEAST_INTEGER = -float(2**31)
#: Order of dimensions from [batch, length, heads, dim] to [batch, heads, length, dim] and back.
_HEADS_FIRST = [0, 2, 1, 3]


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


@torch.library.custom_op("exportable_cache::rotated", mutates_args=())
def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of values that are half of the last dimension apart.

    Args:
        x: [batch, heads, length, dim].
        cos: [batch, length, dim / 2], of the dtype of `x`.
        sin: Likewise.
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@rotated.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


ROTATED = torch.ops.exportable_cache.rotated.default


class JoinedWeights:
    """Joined weights of the graphs of one model, which share them, because each is as large as its sources."""

    def __init__(self) -> None:
        # With the sources, so that no other tensor gets their address.
        self._made: dict[Any, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def of(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows of tensors after each other."""
        key = tuple((one.data_ptr(), one.dtype, one.shape, one.stride()) for one in sources)
        if key not in self._made:
            self._made[key] = sources, torch.cat([one.detach() for one in sources])
        return self._made[key][1]


def simplify(module: GraphModule, joined: JoinedWeights | None = None) -> None:
    """Replace operators by fewer ones, and remove repeated ones, in place.

    Replaced are products of one tensor with several weights, rotations, reciprocal roots, and reshapes next to
    transpositions.

    Args:
        module: Lowered graph.
        joined: Joined weights of other graphs of the same model.
    """
    graph = module.graph
    _remove_repeated(graph)
    _merge_products(module, joined or JoinedWeights())
    # Rotations first, because other replacements change the operators they consist of.
    for replacements in ((_rotary,), (_rotation, _division, _shuffle, _cast_logarithm)):
        for node in list(graph.nodes):
            for replace in replacements:
                if replace(graph, node):
                    break
    _remove_repeated(graph)
    _scale_tables(graph)
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
    """Replace `cat(-x2, x1) * sin` by `swapped(x) * (sin with its first half negated)`.

    The second sine is the same for all layers, and negation is exact.
    """
    found = _turned(node)
    if found is None:
        return False
    source, sine = found
    signed = _call(graph, _after(sine, node), _value(sine), NEGATED_FIRST_HALF, sine)
    swapped = _call(graph, node, _value(source), torch.ops.exportable_cache.swapped_halves.default, source)
    return _replace(node, _call(graph, node, _value(node), _aten.mul.Tensor, swapped, signed))


def _turned(node: Any) -> tuple[Any, Any] | None:
    """Return the nodes of `x` and `sin` if a node is `cat(-x2, x1) * sin`."""
    if not (_is(node, _aten.mul.Tensor) and any(_is(one, _aten.cat.default) for one in node.args)):
        return None
    turned, sine = node.args if _is(node.args[0], _aten.cat.default) else reversed(node.args)
    parts, dim = turned.args[0], turned.args[1] if len(turned.args) > 1 else 0
    made, of_sine = _value(turned), _value(sine)
    if made is None or of_sine is None or len(parts) != 2 or dim not in (-1, made.dim() - 1):
        return None
    if made.dtype != of_sine.dtype or made.shape[-1] != of_sine.shape[-1] or not _is(parts[0], _aten.neg.default):
        return None
    source, half = _half(parts[0].args[0], 1), made.shape[-1] // 2
    if source is None or source is not _half(parts[1], 0) or _value(source).shape[-1] != 2 * half:
        return None
    return source, sine


def _rotary(graph: Graph, node: Any) -> bool:
    """Replace `x * cos + cat(-x2, x1) * sin` of heads by one operator with half of each table, which all layers share.

    The halves of both tables must be equal, as those of angles `cat(freqs, freqs)` are.
    """
    if not _is(node, _aten.add.Tensor) or node.kwargs:
        return False
    for product, turned in (node.args[:2], node.args[1::-1]):
        found = _turned(turned)
        if found is None or not _is(product, _aten.mul.Tensor):
            continue
        source, sine = found
        others = [one for one in product.args if one is not source]
        if len(others) != 1:
            continue
        tables = [_half_table(graph, one, source) for one in (others[0], sine)]
        if None not in tables:
            return _replace(node, _call(graph, node, _value(node), ROTATED, source, *tables))
    return False


def _half_table(graph: Graph, table: Any, source: Any) -> Any:
    """Return the first half [batch, length, dim / 2] of a table [batch, 1, length, dim]; None if it is another one."""
    before = table.args[0] if _is(table, _aten.unsqueeze.default) and table.args[1] in (1, -3) else None
    value, of_source = _value(before), _value(source)
    if value is None or of_source.dim() != 4 or value.dim() != 3 or value.dtype != of_source.dtype:
        return None
    batch, _, length, dim = of_source.shape
    alike = [str(size) for size in value.shape] == [str(size) for size in (batch, length, dim)]
    if not alike or not _has_equal_halves(before):
        return None
    half = value[..., : dim // 2]
    return _call(graph, table, half, _aten.slice.Tensor, before, 2, 0, dim // 2)


def _has_equal_halves(node: Any) -> bool:
    """Return True if a node's last dimension joins one tensor with itself, and each value was changed alike."""
    while isinstance(node, Node):
        if node.target in _OF_EACH_VALUE or (_is(node, _aten.mul.Tensor) and isinstance(node.args[1], (int, float))):
            node = node.args[0]
            continue
        joined: Any = node.args
        if not _is(node, _aten.cat.default) or len(joined) < 2 or len(joined[0]) != 2:
            return False
        return joined[0][0] is joined[0][1] and joined[1] in (-1, _value(node).dim() - 1)
    return False


def _scale_tables(graph: Graph) -> None:
    """Multiply the tables of rotated queries by attention's scale, once for all layers, in place of each query.

    In 16 bits, only a power of two is moved, because another factor would round the tables again.
    """
    node: Any
    for node in list(graph.nodes):
        scale = node.kwargs.get("scale") if _is(node, _aten.scaled_dot_product_attention.default) else None
        query: Any = node.args[0] if scale else None
        if scale is None or scale == 1 or not _is(query, ROTATED) or len(query.users) != 1:
            continue
        if _value(query).dtype != torch.float32 and math.frexp(scale)[0] != 0.5:
            continue
        source, *tables = query.args
        scaled = [_call(graph, _after(one, query), _value(one), _aten.mul.Tensor, one, scale) for one in tables]
        query.args = (source, *scaled)
        node.kwargs = {**node.kwargs, "scale": 1.0}


def _merge_products(module: GraphModule, joined: JoinedWeights) -> None:
    """Compute linear layers that read one tensor, and whose results are split into heads of one size, as one product.

    Slices of its result are the heads.
    """
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for node in module.graph.nodes:
        if _is(node, _aten.linear.default):
            heads = _split_into_heads(node)
            if heads is not None:
                key = (node.args[0], _value(heads).shape[3], _bias(node) is None)
                groups.setdefault(key, []).append((node, heads))
    for group in groups.values():
        if len(group) > 1:
            _merge(module, group, joined)


def _split_into_heads(linear: Any) -> Any:
    """Return the only reader of a product if it reshapes it to [batch, length, heads, dim]."""
    reader = next(iter(linear.users)) if len(linear.users) == 1 else None
    if reader is None or reader.target not in _RESHAPES or _sizes(reader) is None:
        return None
    made, given = _value(reader), _value(linear)
    fits = given.dim() == 3 and made.dim() == 4 and all(isinstance(size, int) for size in made.shape[2:])
    same = fits and [str(size) for size in made.shape[:2]] == [str(size) for size in given.shape[:2]]
    return reader if same else None


def _bias(linear: Any) -> Any:
    return linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")


def _merge(module: GraphModule, group: list[tuple[Any, Any]], known: JoinedWeights) -> None:
    graph, (first, heads) = module.graph, group[0]
    weight = _joined(module, first, [linear.args[1] for linear, _ in group], known)
    biases = [_bias(linear) for linear, _ in group]
    bias = None if biases[0] is None else _joined(module, first, biases, known)
    if weight is None or (bias is None and biases[0] is not None):
        return
    counts = [_value(split).shape[2] for _, split in group]
    batch, length, _, dim = _sizes(heads) or [-1] * 4  # stated, as `_split_into_heads` found
    made, split = _value(first), _value(heads)
    whole = made.new_empty(*made.shape[:2], sum(counts) * dim)
    product = _call(
        graph, first, whole, _aten.linear.default, *[first.args[0], weight, bias][: 2 if bias is None else 3]
    )
    readers = [next(iter(one.users)) for _, one in group if len(one.users) == 1]
    transposed = len(readers) == len(group) and all(
        _is(one, _aten.permute.default) and list(one.args[1]) == _HEADS_FIRST for one in readers
    )
    joined = split.new_empty(*split.shape[:2], sum(counts), dim)
    sizes = [batch, length, sum(counts), dim]
    if transposed:
        shuffle = (torch.ops.exportable_cache.shuffled.default, product, [0, 1, 2], sizes, _HEADS_FIRST)
        whole_heads = _call(graph, first, joined.transpose(1, 2), *shuffle)
    else:
        whole_heads = _call(graph, first, joined, _aten.view.default, product, sizes)
    start = 0
    for index, count in enumerate(counts):
        of_head = readers[index] if transposed else group[index][1]
        args = (whole_heads, 1 if transposed else 2, start, start + count)
        _replace(of_head, _call(graph, of_head, _value(of_head), _aten.slice.Tensor, *args))
        start += count
    for linear, split in group:
        # Not left to dead code elimination, because operators of quantized weights are tagged as random.
        for node in (*split.users, split, linear, linear.args[1]):
            if not node.users:
                graph.erase_node(node)


def _joined(module: GraphModule, before: Any, nodes: Sequence[Any], known: JoinedWeights) -> Any:
    """Return a node with the rows of weights after each other, quantized ones too; None if their kinds differ."""
    if all(isinstance(node, Node) and node.op == "get_attr" for node in nodes):
        tensors = [operator.attrgetter(node.target)(module) for node in nodes]
        if len({(one.dtype, one.shape[1:]) for one in tensors}) != 1:
            return None
        name = f"{before.name}_{len(list(module.buffers(recurse=False)))}_joined"
        module.register_buffer(name, known.of(tensors), persistent=False)
        with module.graph.inserting_before(before):
            made = module.graph.get_attr(name)
        made.meta = {"val": nodes[0].meta["val"].new_empty(getattr(module, name).shape)}
        return made
    of_calls = all(isinstance(node, Node) and node.op == "call_function" for node in nodes)
    if not of_calls or len({(node.target, len(node.args)) for node in nodes}) != 1 or any(one.kwargs for one in nodes):
        return None
    if nodes[0].target not in _QUANTIZED:
        return None
    arguments = []
    for given in zip(*(node.args for node in nodes), strict=True):
        one = given[0] if len(set(given)) == 1 else None
        if isinstance(given[0], Node):
            one = _joined(module, before, given, known)
        if one is None:
            return None
        arguments.append(one)
    rows = sum(_value(node).shape[0] for node in nodes)
    value = _value(nodes[0])
    return _call(module.graph, before, value.new_empty(rows, *value.shape[1:]), nodes[0].target, *arguments)


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


def _cast_logarithm(graph: Graph, node: Any) -> bool:
    """Limit a logarithm that is cast to integers, because of log(0), which TensorRT casts to an undefined number.

    Models of T5's family discard it afterwards.
    """
    value, source = _value(node), node.args[0] if _is(node, TO_COPY) else None
    if value is None or _value(source) is None or value.is_floating_point() or not _value(source).is_floating_point():
        return False
    origin: Any = source
    while any(map(partial(_is, origin), (_aten.mul.Tensor, _aten.div.Tensor))) and not isinstance(origin.args[1], Node):
        origin = origin.args[0]
    if not _is(origin, _aten.log.default):
        return False
    node.args = (_call(graph, node, _value(source), _aten.clamp.default, source, _LEAST_INTEGER), *node.args[1:])
    return True


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
