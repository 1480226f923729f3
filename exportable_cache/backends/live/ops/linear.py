"""Linear layers of few rows by a kernel of this package, `few_rows.cpp`: in captured graphs, and as steps run.

A decode step has a row for each sequence, and its linear layers take as long as memory takes to give their weights.
oneDNN and MKL are made for many rows and reach half of that. Prompts stay with them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ....common.compat.torch import LINEAR, fixed_size, linear_by_onednn
from ....common.native.machine_code import MachineCode, cpu_fields
from .native import RECORDING_RESULTS, OwnOperators

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


#: Rows up to which the kernel is faster than oneDNN. Measured with 1 to 16 on an AMD processor with AVX-512.
MOST_ROWS = 16
#: `torch.nn.functional.linear` as TorchDynamo records it.
_LINEARS = (LINEAR, torch.ops.aten.linear.default)
#: The kernel takes a weight [out, in] of at least these sizes, and groups of inputs that have a scale each.
_LEAST_OUT, _LEAST_IN, _LEAST_GROUP = 12, 16, 32
_FOLDER = Path(__file__).parent


def _shape_of(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _shapes_of(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_shape_of(x, weight) for weight in weights]


#: `EXPORTABLE_CACHE_LINEARS` chooses who computes linear layers of few rows: `torch` for its own operators.
OPERATORS = OwnOperators(
    MachineCode(
        *(_FOLDER / name for name in ("few_rows.cpp", "row_products.h", "vectors.h", "recording.h")),
        results=RECORDING_RESULTS,
    ),
    "EXPORTABLE_CACHE_LINEARS",
    {"few_rows_linear": _shape_of, "few_rows_linear_int8": _shape_of, "few_rows_linears": _shapes_of},
)


def linears_of_few_rows(module: GraphModule) -> int:
    """Replace, in place, the linear layers of a captured graph that the kernel can compute.

    Args:
        module: As TorchDynamo gives it, without gradients.

    Returns:
        How many.
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
    """Have one call compute those that a layer of the model has for the same rows: threads begin and end together once,
    and not for each.
    """
    # Here, as it imports the compiler, which takes long.
    from ..regions import layer_of

    groups: dict[tuple, list[Node]] = {}
    for node in linears:
        x, weight, bias = cast(tuple[Any, ...], node.args)
        # At the place of the first one, parameters are there, and what is computed may not be.
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
        for place, node in enumerate(nodes):
            node.target, node.args = operator.getitem, (call, place)


def linear_of_few_rows(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` by the kernel, once it is loaded; None of what it does not compute."""
    target = _operator_for(input, weight, bias)
    return None if target is None else target(input, weight, bias)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Over weights in float32 or bfloat16."""
    return torch.ops.exportable_cache.few_rows_linear.default(x, weight, bias)


def plain_linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Several over weights in float32 or in bfloat16, with biases or without."""
    return torch.ops.exportable_cache.few_rows_linears.default(x, weights, biases)


def quantized_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Over weights of torchao in 8 bits, and in fewer that have a byte each."""
    zero_point = None if _has_no_zeros(weight) else weight.zero_point
    return torch.ops.exportable_cache.few_rows_linear_int8.default(x, weight.qdata, weight.scale, zero_point, bias)


def _operator_for(x: Any, weight: Any, bias: Any) -> Callable[..., torch.Tensor] | None:
    """Which of the two computes a layer of such tensors, None for none."""
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
    """Whether the kernel reads a weight of a class of torchao's as it is."""
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
    """Whether a weight has a scale for each output and nothing else: torchao does not read zero points of those."""
    return type(weight).__name__ == "Int8Tensor" and weight.block_size[1] == weight.shape[1]


def onednn_is_better() -> bool:
    """Whether torch has both libraries, and this processor is one that MKL does not serve well."""
    vendor = cpu_fields().get("vendor_id", "GenuineIntel")
    return vendor != "GenuineIntel" and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def linear_of_float32(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` by oneDNN; None of what it does not compute."""
    if _is_matrix(weight) and all(_is_float32(one) for one in (input, weight, bias) if one is not None):
        return linear_by_onednn(input, weight, bias)
    return None


def linears_by_onednn(module: GraphModule) -> int:
    """Replace, in place, the linear layers of a captured graph that oneDNN can compute.

    Args:
        module: As TorchDynamo or `torch.export` gives it, without gradients.

    Returns:
        How many.
    """
    if not onednn_is_better():
        return 0
    # Here, as it imports the compiler, which takes long.
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
    """Whether it is of float32 tensors on the CPU, and its weight lies in memory without gaps."""
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
        # Quantised weights of torchao call themselves float32.
        and not hasattr(value, "__tensor_flatten__")
    )


def _value_of(node: object) -> object:
    """The fake tensor of a node, where TorchDynamo and `torch.export` note it."""
    meta = getattr(node, "meta", {})
    return meta.get("example_value", meta.get("val"))
