"""Linear layers through this package's own operators, `exportable_cache::linear_float` over weights of float32,
`linear_bfloat16` and `linear_float16` over those that these have without loss, and `linear_4bit` over those of 4 bits;
see `kernels/`.

XNNPACK (of ExecuTorch 1.4.1) packs a second copy of the weights as a program is loaded. Here they are packed as they
are exported, and read where the file is mapped. Weights of 4 bits it multiplies in 16 bits on a processor with AVX2 and
no AVX-512, half as fast.

A checkpoint in 16 bits is computed in float32, with half of the bytes to read: what a token waits for.

With weights of 4 bits, activations are rounded to 8, each token by itself, as torchao's `8da4w` says.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from executorch.backends.transforms.utils import get_param_tensor, is_param
from torch.fx import Node

from ....common.tensors import exact_dtype
from ..passes.graph_edits import insert_call, packed_weight, replace_call
from ..quantized.linears import fold_linears, int4_layer
from .weights import BLOCK, GROUP_MULTIPLE, NAMES, pack, pack_float, unpack, unpack_float

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from ....common.compat.torch import OpOverload

#: Layers of one call, at most: `kernels/src/linear.h` has the same.
MOST_LAYERS = 4
_library = torch.library.Library("exportable_cache", "FRAGMENT")
_LINEAR = "(Tensor source, Tensor weights, Tensor? bias, int outputs"
_LINEARS = "(Tensor source, Tensor[] weights, Tensor[] biases, int[] outputs"
_PLAIN = torch.ops.aten.linear.default


class _Packed(NamedTuple):
    """A layer as an operator of ours takes it."""

    operator: OpOverload
    source: Node
    weight: Node
    bias: Node | None
    outputs: int


def linears_to_own(program: ExportedProgram) -> ExportedProgram:
    """Rewrite each linear layer that an operator of ours can be, in place; others are left as they are.

    Layers that take the same rows, as those of queries, keys and values do, are one call: rows are rounded once, and
    threads wait for each other once.
    """
    graph = fold_linears(program).graph
    alike: dict[tuple[OpOverload, Node, bool], list[tuple[Node, _Packed]]] = {}
    for node in list(graph.nodes):
        layer = _packed_4bit(program, node) or _packed_float(program, node)
        if layer is None:
            continue
        alike.setdefault((layer.operator, layer.source, layer.bias is None), []).append((node, layer))
    made = [
        one
        for layers in alike.values()
        for start in range(0, len(layers), MOST_LAYERS)
        for one in _called(graph, layers[start : start + MOST_LAYERS])
    ]
    # Behind all calls, of which some take what others give.
    for node, result in made:
        replace_call(node, result)
    if made:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def _called(graph: Graph, layers: list[tuple[Node, _Packed]]) -> list[tuple[Node, Node]]:
    """Layers that take the same rows, each with its result by one call, which is where the first of them is."""
    first, layer = layers[0]
    weights = [one.weight for _, one in layers]
    outputs = [one.outputs for _, one in layers]
    with graph.inserting_before(first):
        if len(layers) == 1:
            call = insert_call(graph, layer.operator, layer.source, layer.weight, layer.bias, layer.outputs)
            results = [call]
        else:
            biases = [one.bias for _, one in layers if one.bias is not None]
            call = insert_call(graph, _TOGETHER[layer.operator], layer.source, weights, biases, outputs)
            results = [insert_call(graph, operator.getitem, call, index) for index in range(len(layers))]
    for (node, _), result in zip(layers, results, strict=True):
        result.meta = {**node.meta, "val": result.meta["val"]}
    return [(node, result) for (node, _), result in zip(layers, results, strict=True)]


def _packed_4bit(program: ExportedProgram, node: Node) -> _Packed | None:
    layer = int4_layer(node)
    if layer is None or layer.group % GROUP_MULTIPLE:
        return None
    zero_point = None if layer.zero_point is None else get_param_tensor(program, layer.zero_point)
    if zero_point is not None and bool(zero_point.any()):
        return None
    integers, scales = (get_param_tensor(program, part) for part in (layer.integers, layer.scale))
    call = torch.ops.exportable_cache.linear_4bit.default
    packed = packed_weight(program, layer.integers, lambda: pack(integers, scales))
    return _Packed(call, layer.source, packed, layer.bias, integers.shape[0])


def is_own(program: ExportedProgram, node: Node) -> bool:
    """Whether an operator of ours can be a layer in float32."""
    if node.target is not _PLAIN:
        return False
    found: Any = node.args
    source, weight = found[:2]
    if not is_param(program, weight):
        return False
    form = weight.meta["val"]
    return form.dtype == source.meta["val"].dtype == torch.float32 and form.shape[0] >= BLOCK


def _packed_float(program: ExportedProgram, node: Node) -> _Packed | None:
    """None of a layer whose weights are also read otherwise: a table that the head is tied to is kept once."""
    if not is_own(program, node):
        return None
    found: list[Any] = [*node.args, None]
    source, weight, bias = found[:3]
    if any(user.target is not _PLAIN for user in weight.users):
        return None
    numbers = get_param_tensor(program, weight)
    dtype = exact_dtype(numbers)
    call = getattr(torch.ops.exportable_cache, f"linear_{NAMES[dtype]}").default
    return _Packed(call, source, packed_weight(program, weight, lambda: pack_float(numbers, dtype)), bias, len(numbers))


def linear_float(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """A linear layer in plain operators: what the kernels of `linear_float`, `linear_bfloat16` and `linear_float16`
    compute.

    Args:
        source: float32 [..., inputs].
        weights: Of `pack_float`.
        bias: float32 [outputs], or None.
        outputs: How many there are.

    Returns:
        float32 [..., outputs].
    """
    return torch.nn.functional.linear(source, unpack_float(weights, source.shape[-1], outputs), bias)


def linear_4bit(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """A linear layer over weights of 4 bits, its input rounded to 8, in plain operators: what the kernel computes.

    Args:
        source: float32 [..., inputs].
        weights: uint8 [blocks, bytes], of `pack`.
        bias: float32 [outputs], or None.
        outputs: How many there are.

    Returns:
        float32 [..., outputs].
    """
    integers, scales = unpack(weights, source.shape[-1], outputs)
    groups = scales.shape[1]
    plain = (integers.view(outputs, groups, -1) * scales.float()[..., None]).view(outputs, -1)
    lowest, highest = source.amin(-1, keepdim=True).clamp(max=0), source.amax(-1, keepdim=True).clamp(min=0)
    scale = ((highest - lowest) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-128 - torch.round(lowest / scale)).clamp(-128, 127)
    rounded = (torch.round(source * (1 / scale)) + zero).clamp(-128, 127)
    return torch.nn.functional.linear((rounded - zero) * scale, plain, bias)


def _output(source: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], outputs)


def _define(name: str, plain: Callable[..., torch.Tensor]) -> None:
    """One layer, `linear_...`, and several, `linears_...`; ExecuTorch calls those that are named out."""

    def into(*arguments: object, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(plain(*arguments))

    def several(of: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
        def call(
            source: torch.Tensor,
            weights: Sequence[torch.Tensor],
            biases: Sequence[torch.Tensor],
            outputs: Sequence[int],
        ) -> list[torch.Tensor]:
            each = biases or itertools.repeat(None, len(weights))
            return [of(source, *layer) for layer in zip(weights, each, outputs, strict=True)]

        return call

    def several_into(*arguments: Any, out: Sequence[torch.Tensor]) -> None:
        for target, result in zip(out, several(plain)(*arguments), strict=True):
            target.copy_(result)

    together = name.replace("linear", "linears")
    for schema, function in (
        (f"{name}{_LINEAR}) -> Tensor", plain),
        (f"{name}.out{_LINEAR}, *, Tensor(a!) out) -> Tensor(a!)", into),
        (f"{together}{_LINEARS}) -> Tensor[]", several(plain)),
        (f"{together}.out{_LINEARS}, *, Tensor(a!)[] out) -> ()", several_into),
    ):
        _library.define(schema)
        _library.impl(schema[: schema.index("(")], function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"exportable_cache::{name}", _output, lib=_library)
    torch.library.register_fake(f"exportable_cache::{together}", several(_output), lib=_library)


for _name in NAMES.values():
    _define(f"linear_{_name}", linear_float)
_define("linear_4bit", linear_4bit)
_TOGETHER: dict[OpOverload, OpOverload] = {
    getattr(torch.ops.exportable_cache, f"linear_{name}").default: getattr(
        torch.ops.exportable_cache, f"linears_{name}"
    ).default
    for name in (*NAMES.values(), "4bit")
}
