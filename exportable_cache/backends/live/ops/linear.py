"""Compute linear layers with few rows by this package's kernel, `few_rows.cpp`, and others by oneDNN where MKL is slow.

A decode step has one row per sequence, so its linear layers are limited by how fast memory delivers weights. oneDNN and
MKL are optimized for many rows and reach half of that bandwidth.

torch multiplies float32 matrices with MKL, which uses a generic path on processors that are not Intel's. oneDNN
generates code for any processor, and takes the model's weights without packing or copying them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ....common.compat.torch import LINEAR, fixed_size, linear_by_onednn
from ....common.native.machine_code import MachineCode, NativeOperators, cpu_fields

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


#: Number of rows up to which the kernel is faster than oneDNN, measured with 1 to 16 on an AMD processor with AVX-512.
MOST_ROWS = 16
#: The targets that TorchDynamo records for `torch.nn.functional.linear`.
_LINEARS = (LINEAR, torch.ops.aten.linear.default)
#: Minimum sizes of a weight [out, in], and of a quantization group.
_LEAST_OUT, _LEAST_IN, _LEAST_GROUP = 12, 16, 32
_FOLDER = Path(__file__).parent


def _shape_of(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _shapes_of(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_shape_of(x, weight) for weight in weights]


#: `EXPORTABLE_CACHE_LINEARS=torch` disables the kernel.
OPERATORS = NativeOperators(
    MachineCode(
        *(_FOLDER / name for name in ("few_rows.cpp", "row_products.h", "vectors.h")),
    ),
    "EXPORTABLE_CACHE_LINEARS",
    {"few_rows_linear": _shape_of, "few_rows_linear_int8": _shape_of, "few_rows_linears": _shapes_of},
)


def linears_of_few_rows(module: GraphModule) -> int:
    """Replace the linear layers of a captured graph that the kernel supports, in place.

    Args:
        module: A graph captured by TorchDynamo without gradients.

    Returns:
        The number of replaced layers.
    """
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _LINEARS:
            names = ("input", "weight", "bias")
            args = (*node.args, *(node.kwargs.get(name) for name in names[len(node.args) :]))
            target = _operator_for(*(_value_of(one) for one in args))
            if target is not None:
                found.append((node, target, args))
    if not found or not OPERATORS.load():
        return 0
    for node, target, args in found:
        node.target, node.args, node.kwargs = target, args, {}
    _join([node for node, target, _ in found if target is plain_linear])
    module.recompile()
    return len(found)


def _join(linears: Sequence[Node]) -> None:
    """Merge linear layers of one model layer with the same input, because each call starts and joins threads."""
    # Imported here because it imports the compiler, which takes seconds.
    from ..regions import layer_of

    groups: dict[tuple, list[Node]] = {}
    for node in linears:
        x, weight, bias = cast(tuple[Any, ...], node.args)
        # Only parameters, because a computed weight may not exist yet where the first of the layers is called.
        if all(one is None or one.op in ("placeholder", "get_attr") for one in (weight, bias)):
            groups.setdefault(
                (x, layer_of(node), bias is None, cast(torch.Tensor, _value_of(weight)).dtype), []
            ).append(node)
    for nodes in groups.values():
        if len(nodes) < 2:
            continue
        (x, *_), first = nodes[0].args, nodes[0]
        biases = [node.args[2] for node in nodes if node.args[2] is not None]
        with first.graph.inserting_before(first):
            call = first.graph.call_function(plain_linears, (x, [node.args[1] for node in nodes], biases))
        call.meta = {**first.meta, "example_value": [_value_of(node) for node in nodes]}
        for index, node in enumerate(nodes):
            node.target, node.args = operator.getitem, (call, index)


def linear_of_few_rows(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """Compute `torch.nn.functional.linear` with the kernel, which must be loaded; None if it is not supported."""
    target = _operator_for(input, weight, bias)
    return None if target is None else target(input, weight, bias)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a weight in float32 or bfloat16."""
    return torch.ops.exportable_cache.few_rows_linear.default(x, weight, bias)


def plain_linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Apply several weights of one dtype, float32 or bfloat16, to the same input; `biases` may be empty."""
    return torch.ops.exportable_cache.few_rows_linears.default(x, weights, biases)


def quantized_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a torchao weight whose numbers are stored in one byte each."""
    zero_point = None if _has_no_zeros(weight) else weight.zero_point
    return torch.ops.exportable_cache.few_rows_linear_int8.default(x, weight.qdata, weight.scale, zero_point, bias)


def _operator_for(x: Any, weight: Any, bias: Any) -> Callable[..., torch.Tensor] | None:
    """Return the operator that supports these tensors, or None."""
    if not all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in (x, weight)):
        return None
    if x.dtype not in (torch.float32, torch.bfloat16) or hasattr(x, "__tensor_flatten__"):
        return None
    sizes = [size for size in map(fixed_size, x.shape[:-1]) if size is not None]
    if len(sizes) < x.dim() - 1 or not 0 < math.prod(sizes) <= MOST_ROWS or weight.dim() != 2:
        return None
    if weight.shape[0] < _LEAST_OUT or weight.shape[1] < _LEAST_IN:
        return None
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.dtype != x.dtype or not bias.is_contiguous()):
        return None
    if hasattr(weight, "__tensor_flatten__"):
        return quantized_linear if _is_readable(weight) else None
    return plain_linear if weight.dtype == x.dtype and weight.is_contiguous() else None


def _is_readable(weight: Any) -> bool:
    """Return True if the kernel can read a quantized weight of torchao."""
    kind = type(weight).__name__
    if kind == "Int8Tensor":
        changes_input = weight.act_quant_kwargs is not None or weight.act_pre_scale is not None
    elif kind == "IntxUnpackedToInt8Tensor":
        changes_input = weight.activation_quantization is not None
    else:
        return False
    if changes_input or weight.block_size[0] != 1 or weight.scale.dtype not in (torch.float32, torch.bfloat16):
        return False
    parts = [weight.qdata, weight.scale]
    if not _has_no_zeros(weight):
        group = weight.block_size[1]
        if group < _LEAST_GROUP or group & (group - 1) or weight.shape[1] % group:
            return False
        if not isinstance(weight.zero_point, torch.Tensor) or weight.zero_point.dtype != torch.int8:
            return False
        parts.append(weight.zero_point)
    return all(part.is_contiguous() for part in parts)


def _has_no_zeros(weight: Any) -> bool:
    """Return True for weights with one scale per output, whose zero points torchao ignores."""
    return type(weight).__name__ == "Int8Tensor" and weight.block_size[1] == weight.shape[1]


def onednn_is_better() -> bool:
    """Return True if torch has oneDNN and MKL, and the processor is not Intel's."""
    vendor = cpu_fields().get("vendor_id", "GenuineIntel")
    return vendor != "GenuineIntel" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def linear_of_float32(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """Compute `torch.nn.functional.linear` with oneDNN; None if it is not supported."""
    if _is_matrix(weight) and all(_is_float32(one) for one in (input, weight, bias) if one is not None):
        return linear_by_onednn(input, weight, bias)
    return None


def linears_by_onednn(module: GraphModule) -> int:
    """Replace the linear layers of a captured graph that oneDNN supports, in place.

    Args:
        module: A graph captured by TorchDynamo or `torch.export` without gradients.

    Returns:
        The number of replaced layers.
    """
    if not onednn_is_better():
        return 0
    # Imported here because it imports the compiler, which takes seconds.
    from ....common.compat.torch_onednn import LINEARS, ONEDNN_LINEAR

    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target in LINEARS]
    found = [node for node in found if _is_plain(node)]
    for node in found:
        named = (node.kwargs.get(name) for name in ("input", "weight", "bias")[len(node.args) :])
        node.args, node.kwargs, node.target = (*node.args, *named), {}, ONEDNN_LINEAR
    if found:
        module.recompile()
    return len(found)


def _is_plain(node: Node) -> bool:
    """Return True for float32 tensors on the CPU with a contiguous weight."""
    values = [_value_of(source) for source in node.all_input_nodes]
    weight = _value_of(node.args[1] if len(node.args) > 1 else node.kwargs["weight"])
    return _is_matrix(weight) and all(map(_is_float32, values))


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_contiguous()


def _is_float32(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and value.device.type == "cpu"
        # Not quantized weights of torchao, whose dtype is float32 too.
        and not hasattr(value, "__tensor_flatten__")
    )


def _value_of(node: object) -> object:
    """Return the fake tensor that TorchDynamo or `torch.export` has recorded for a node."""
    meta = getattr(node, "meta", {})
    return meta.get("example_value", meta.get("val"))
