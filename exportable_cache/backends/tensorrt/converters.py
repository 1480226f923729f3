"""Converters and decompositions for operators that torch_tensorrt 2.13.0 lacks or computes differently from torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...common.compat.torch import RESHAPE_COPY
from ...models import rounding  # noqa: F401  registers the operators
from . import experts as _experts  # noqa: F401  registers the operators
from . import kv_cache  # noqa: F401  registers the operator
from .kv_cache import scatter_update
from .plain_layers import TORCH_DTYPES, TRT_DTYPES, add_constant, converts, has_constant, named, reshaped, shared_cast
from .quantized import dequantize_affine, kept_scale, packed
from .upstream import cast_trt_tensor, get_trt_tensor, set_layer_name, trt

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ...common.compat.torch import OperatorBase
    from .upstream import ConversionContext


@converts(torch.ops.exportable_cache.kv_cache_update.default)
def _kv_cache_update(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to TensorRT's KVCacheUpdate layer, in place from a network input to a network output."""
    cache, update, start = args
    # Cast, because the layer takes int32 indices only.
    start = shared_cast(ctx, start, trt.DataType.INT32, f"{name}_start")
    layer = ctx.net.add_kv_cache_update(cache, update, start, trt.KVCacheMode.LINEAR)
    if layer is None:
        raise ValueError(
            f"TensorRT cannot update a KV cache of {list(cache.shape)} {cache.dtype} by {list(update.shape)} "
            f"{update.dtype} at {list(start.shape)} {start.dtype}"
        )
    return layer


@converts(torch.ops.aten.where.self)
def _where(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ITensor:
    """Convert `where` in the result's dtype; torch_tensorrt's converter casts bfloat16, int64 and bool to int32."""
    result = ctx.current_node.meta["val"]
    dtype = TRT_DTYPES[result.dtype]
    # Cast, because the layer takes no bool.
    chosen_in = trt.DataType.INT32 if dtype == trt.DataType.BOOL else dtype
    condition = _of_rank(ctx, get_trt_tensor(ctx, args[0], f"{name}_condition"), result.dim(), f"{name}_condition")
    branches = []
    for branch, given in zip(("then", "else"), args[1:], strict=True):
        tensor = cast_trt_tensor(
            ctx, get_trt_tensor(ctx, given, f"{name}_{branch}"), chosen_in, f"{name}_{branch}_cast"
        )
        branches.append(_of_rank(ctx, tensor, result.dim(), f"{name}_{branch}"))
    layer = ctx.net.add_select(condition, *branches)
    set_layer_name(layer, ctx.current_node.target, name)
    return cast_trt_tensor(ctx, layer.get_output(0), dtype, f"{name}_cast")


@converts(torch.ops.aten.gather.default)
def _gather(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert `gather` of any length and of constants; torch_tensorrt's equal converter accepts static shapes only."""
    values, dim, index = args[:3]
    values, index = get_trt_tensor(ctx, values, f"{name}_values"), get_trt_tensor(ctx, index, f"{name}_index_tensor")
    layer = ctx.net.add_gather_v2(
        values, cast_trt_tensor(ctx, index, trt.DataType.INT32, f"{name}_index"), trt.GatherMode.ELEMENT
    )
    layer.axis = dim % len(values.shape)
    return layer


@converts(torch.ops.aten.cumsum.default)
def _cumsum(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert `cumsum` to TensorRT's layer; torch_tensorrt's converter makes a loop of static length."""
    values, dim = get_trt_tensor(ctx, args[0], f"{name}_tensor"), args[1]
    values = cast_trt_tensor(ctx, values, TRT_DTYPES[ctx.current_node.meta["val"].dtype], f"{name}_values")
    axis = get_trt_tensor(ctx, torch.tensor(dim % len(values.shape), dtype=torch.int32), f"{name}_axis")
    return ctx.net.add_cumulative(values, axis, trt.CumulativeOperation.SUM, False, False)


@converts(torch.ops.exportable_cache.dequantized_weight.default)
def _dequantized_weight(
    ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ILayer:
    """Convert to a DEQUANTIZE layer of constants: by row with one scale each, else by blocks of a row."""
    integers, scale, zero_point, bits = args
    scale = kept_scale(scale, zero_point, str(ctx.current_node.args[0]))
    shape = list(integers.shape)
    if bits == 4:
        weights = add_constant(ctx, packed(integers), f"{name}_integers", shape, trt.DataType.INT4)
    else:
        weights = add_constant(ctx, integers, f"{name}_integers")
    by_row = bits == 8 and scale.shape[1] == 1
    scales = add_constant(ctx, scale[:, 0] if by_row else scale, f"{name}_scale")
    layer = ctx.net.add_dequantize(weights, scales, TRT_DTYPES[scale.dtype])
    if by_row:
        layer.axis = 0
    return layer


@converts(torch.ops.exportable_cache.chosen_weights.default)
def _chosen_weights(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a gather, of all experts' weights that a DEQUANTIZE layer converts if they are quantised.

    One kernel converts the chosen ones alone; the builder refuses a gather of integers.
    """
    weight, scale, indices, factor, dtype = args
    shape = list(weight.shape)
    if weight.is_floating_point():
        floats = add_constant(ctx, weight, f"{name}_weight")
    elif scale is None:
        floats = _from_float8(ctx, (weight, factor, dtype), name)
    elif scale.dtype == torch.uint8:
        floats = _from_float4(ctx, (weight, scale, factor, dtype), name)
    else:
        if -8 <= int(weight.min()) and int(weight.max()) <= 7:
            pairs = torch.stack([packed(one) for one in weight])
            weights = add_constant(ctx, pairs, f"{name}_integers", shape, trt.DataType.INT4)
        else:
            weights = add_constant(ctx, weight, f"{name}_integers")
        converted = ctx.net.add_dequantize(weights, add_constant(ctx, scale, f"{name}_scale"), TRT_DTYPES[scale.dtype])
        floats = named(converted, f"{name}_floats")
    return ctx.net.add_gather(floats, get_trt_tensor(ctx, indices, f"{name}_indices"), axis=0)


@converts(torch.ops.exportable_cache.slot_product.default)
def _slot_product(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to one product, in which a source of one slot is broadcast."""
    source, weight, transposed = args
    operation = trt.MatrixOperation.NONE if transposed else trt.MatrixOperation.TRANSPOSE
    return ctx.net.add_matrix_multiply(source, trt.MatrixOperation.NONE, weight, operation)


@dataclass(frozen=True)
class _SlotShapes:
    """Tensors of a network that depend on the number of tokens, choices and experts alone.

    Attributes:
        pairs: Number of choices of all tokens, int64 [1].
        slots: Number of slots, int64 [1].
        is_whole: 1 if the slots are all experts, else 0, int64 [1].
        experts: All experts, int64 [experts].
    """

    pairs: trt.ITensor
    slots: trt.ITensor
    is_whole: trt.ITensor
    experts: trt.ITensor


def _slot_shapes(ctx: ConversionContext, indices: trt.ITensor, experts: int, name: str) -> _SlotShapes:
    """Return what the layers of a mixture share."""
    tokens, choices = ctx.current_node.args[0].meta["val"].shape
    shared = vars(ctx).setdefault("shared_slots", {})
    key = (str(tokens), choices, experts)
    if key not in shared:
        net, operation = ctx.net, trt.ElementWiseOperation

        def number(value: int) -> trt.ITensor:
            return add_constant(ctx, torch.tensor([value]), f"{name}_{value}")

        def combined(left: trt.ITensor, right: trt.ITensor, how: trt.ElementWiseOperation, of: str) -> trt.ITensor:
            return named(net.add_elementwise(left, right, how), f"{name}_{of}")

        length = net.add_slice(net.add_shape(indices).get_output(0), (0,), (1,), (1,))
        pairs = combined(named(length, f"{name}_tokens"), number(choices), operation.PROD, "pairs")
        slots = combined(pairs, number(experts), operation.MIN, "slots")
        more = combined(pairs, slots, operation.SUB, "more")
        is_whole = combined(more, number(1), operation.MIN, "is_whole")
        shared[key] = _SlotShapes(pairs, slots, is_whole, add_constant(ctx, torch.arange(experts), f"{name}_experts"))
    return shared[key]


def _part(
    ctx: ConversionContext, tensor: trt.ITensor, start: trt.ITensor | None, size: trt.ITensor, name: str
) -> trt.ITensor:
    """Return `size` elements of a vector from `start` or 0 on; the last one is repeated past the end."""
    layer = ctx.net.add_slice(tensor, (0,), (0,), (1,))
    if start is not None:
        layer.set_input(1, start)
    layer.set_input(2, size)
    layer.mode = trt.SampleMode.CLAMP
    return named(layer, name)


@converts(torch.ops.exportable_cache.expert_slots.default)
def _expert_slots(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ITensor:
    """Convert to a slice of the choices followed by all experts; the number of tokens gives its start and size."""
    indices, experts = args
    shapes = _slot_shapes(ctx, indices, experts, name)
    flat = reshaped(ctx, indices, (-1,), f"{name}_choices")
    joined = named(ctx.net.add_concatenation([flat, shapes.experts]), f"{name}_joined")
    start = ctx.net.add_elementwise(shapes.is_whole, shapes.pairs, trt.ElementWiseOperation.PROD)
    return _part(ctx, joined, named(start, f"{name}_start"), shapes.slots, name)


@converts(torch.ops.exportable_cache.slot_factors.default)
def _slot_factors(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a comparison of each choice's slot with all slots, and a sum over choices.

    The slot of a choice is its own index if there are few choices, else its expert.
    """
    indices, factors, experts = args
    net, operation = ctx.net, trt.ElementWiseOperation
    shapes = _slot_shapes(ctx, indices, experts, name)
    choices = indices.shape[1]
    # indices * is_whole + own * (1 - is_whole) = own + (indices - own) * is_whole
    own = reshaped(
        ctx, _part(ctx, shapes.experts, None, shapes.pairs, f"{name}_own"), (-1, choices), f"{name}_of_token"
    )
    flag = reshaped(ctx, shapes.is_whole, (1, 1), f"{name}_flag")
    moved = named(net.add_elementwise(indices, own, operation.SUB), f"{name}_from_own")
    kept = named(net.add_elementwise(moved, flag, operation.PROD), f"{name}_if_whole")
    slots = named(net.add_elementwise(own, kept, operation.SUM), f"{name}_slots")
    every = reshaped(ctx, _part(ctx, shapes.experts, None, shapes.slots, f"{name}_every"), (-1, 1, 1), f"{name}_column")
    of_token = reshaped(ctx, slots, (1, -1, choices), f"{name}_row")
    is_chosen = named(net.add_elementwise(every, of_token, operation.EQUAL), f"{name}_is_chosen")
    dtype = TORCH_DTYPES[factors.dtype]
    zero = add_constant(ctx, torch.zeros(1, dtype=dtype), f"{name}_zero", (1, 1, 1))
    of_choice = reshaped(ctx, factors, (1, -1, choices), f"{name}_factors")
    selected = named(net.add_select(is_chosen, of_choice, zero), f"{name}_selected")
    return net.add_reduce(selected, trt.ReduceOperation.SUM, 1 << 2, True)


@converts(torch.ops.exportable_cache.float8_weight.default)
def _float8_weight(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a DEQUANTIZE layer of constants, with a scale by row."""
    bits, scale = args
    values = add_constant(ctx, bits, f"{name}_values", dtype=trt.DataType.FP8)
    layer = ctx.net.add_dequantize(values, add_constant(ctx, scale, f"{name}_scale"), TRT_DTYPES[scale.dtype])
    layer.axis = 0
    return layer


@converts(torch.ops.exportable_cache.float4_weight.default)
def _float4_weight(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ITensor:
    """Convert to a DEQUANTIZE layer of constants, whose scales another one converts."""
    return _from_float4(ctx, args, name)


def _from_float4(ctx: ConversionContext, args: Sequence[Any], name: str) -> trt.ITensor:
    """Return the weight of `float4_weight`'s arguments, which may have any number of dimensions before the rows."""
    pairs, scale, factor, dtype = args
    to_type = TRT_DTYPES[dtype]
    values = add_constant(ctx, pairs, f"{name}_values", [*pairs.shape[:-1], 2 * pairs.shape[-1]], trt.DataType.FP4)
    layer = ctx.net.add_dequantize(values, _from_float8(ctx, (scale, factor, dtype), f"{name}_scale"), to_type)
    return named(layer, f"{name}_floats")


def _from_float8(ctx: ConversionContext, args: Sequence[Any], name: str) -> trt.ITensor:
    """Return the product of float8 values, given as uint8, and a factor, in a dtype."""
    bits, factor, dtype = args
    values = add_constant(ctx, bits, f"{name}_values", dtype=trt.DataType.FP8)
    layer = ctx.net.add_dequantize(values, add_constant(ctx, torch.tensor(factor), f"{name}_factor"), TRT_DTYPES[dtype])
    return named(layer, f"{name}_floats")


@converts(torch.ops.exportable_cache.float8_rounded.default)
def _float8_rounded(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a QUANTIZE and a DEQUANTIZE layer with one scale."""
    source, value = args
    source = get_trt_tensor(ctx, source, f"{name}_source")
    scale = add_constant(ctx, torch.tensor(value, dtype=TORCH_DTYPES[source.dtype]), f"{name}_scale")
    rounded = named(ctx.net.add_quantize(source, scale, trt.DataType.FP8), f"{name}_rounded")
    return ctx.net.add_dequantize(rounded, scale, source.dtype)


@converts(torch.ops.aten.linear.default)
def _linear(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ITensor:
    """Convert `linear` to one product; torch_tensorrt's converter adds a layer that reshapes the weight."""
    source, weight, bias = (*args, None)[:3] if len(args) < 3 else args
    source = get_trt_tensor(ctx, source, f"{name}_source")
    leading = [1] * (len(source.shape) - 2)
    operation = trt.MatrixOperation.TRANSPOSE
    sizes = [*source.shape[:-1], weight.shape[0]]
    # A table that is gathered, too, is stored twice if it has three dimensions, or is reshaped to them.
    is_tied = isinstance(weight, torch.Tensor) and has_constant(ctx, weight) and sizes.count(-1) <= 1
    if is_tied:
        source, leading = reshaped(ctx, source, (-1, weight.shape[1]), f"{name}_rows"), []
    if isinstance(weight, torch.Tensor):
        right = add_constant(ctx, weight, f"{name}_weight", [*leading, *weight.shape])
    else:
        # Transposed before the product, because a plan for two ranges of lengths would else store 4 bits twice.
        rows, columns = weight.shape
        turned = ctx.net.add_shuffle(weight)
        turned.first_transpose = (1, 0)
        turned.reshape_dims = (*leading, columns, rows)
        right, operation = named(turned, f"{name}_weight"), trt.MatrixOperation.NONE
    layer = ctx.net.add_matrix_multiply(source, trt.MatrixOperation.NONE, right, operation)
    set_layer_name(layer, ctx.current_node.target, name)
    result = layer.get_output(0)
    if bias is not None:
        added = add_constant(ctx, bias, f"{name}_bias", [*leading, 1, bias.numel()])
        result = named(ctx.net.add_elementwise(result, added, trt.ElementWiseOperation.SUM), f"{name}_biased")
    return reshaped(ctx, result, sizes, f"{name}_of_rows") if is_tied else result


@converts(torch.ops.aten.embedding.default)
def _embedding(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert `embedding` to a gather of a constant, which a tied head multiplies with, too, see `_linear`."""
    table, index = args[:2]
    table = add_constant(ctx, table, f"{name}_table") if isinstance(table, torch.Tensor) else table
    return ctx.net.add_gather(table, get_trt_tensor(ctx, index, f"{name}_index"), axis=0)


def _of_rank(ctx: ConversionContext, tensor: trt.ITensor, rank: int, name: str) -> trt.ITensor:
    """Return the tensor with leading dimensions of size 1, as broadcasting adds them."""
    missing = rank - len(tensor.shape)
    if missing <= 0:
        return tensor
    axes = get_trt_tensor(ctx, torch.arange(missing, dtype=torch.int64), f"{name}_axes")
    return named(ctx.net.add_unsqueeze(tensor, axes), f"{name}_unsqueeze")


def scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> torch.Tensor:
    """Decompose `scatter` of a number, which the converter makes float64, a dtype that TensorRT lacks."""
    return torch.scatter(x, dim, index, torch.full_like(index, value, dtype=x.dtype))


def scatter_empty(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Decompose `scatter` with an empty index: TensorRT reads a size of 0 as "copy the input's size"."""
    return x if index.numel() == 0 else NotImplemented


def select_from_end(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Decompose `select` with a negative index, at which the converter gathers, which is undefined."""
    if not isinstance(index, int) or index >= 0:
        return NotImplemented
    return torch.ops.aten.slice.Tensor(x, dim, index, index + 1 or None).squeeze(dim)


def last_of_dim(
    x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """Decompose `slice` of the last index of a dimension into a gather, if two dimensions are dynamic.

    The converter would set the other one's length to -1.
    """
    lengths = [size for size in x.shape if isinstance(size, torch.SymInt)]
    if start != -1 or (end is not None and end < 2**62) or len(lengths) < 2:
        return NotImplemented
    last = torch.arange(x.shape[dim], device=x.device)[-1:]
    return torch.index_select(x, dim, last)


def log1p(x: torch.Tensor) -> torch.Tensor:
    """Decompose `log1p`, which has no converter.

    The error of `1 + x` is divided out again, so the result is exact to a few roundings even for small x.
    """
    near = 1 + x
    is_lost = near == 1
    return torch.where(is_lost, x, torch.log(near) * (x / torch.where(is_lost, torch.ones_like(x), near - 1)))


def baddbmm(
    x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Decompose `baddbmm`, which has no converter; `x` is ignored if `beta` is 0."""
    product = torch.bmm(left, right)
    product = product if alpha == 1 else product * alpha
    return product + (x if beta == 1 else x * beta) if beta != 0 else product


def div(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """Decompose true division of integers, which TensorRT would truncate."""
    if not all(isinstance(one, int) or isinstance(one, torch.Tensor) and _is_integral(one) for one in (x, y)):
        return NotImplemented
    x, y = (one.to(torch.get_default_dtype()) if isinstance(one, torch.Tensor) else one for one in (x, y))
    return torch.true_divide(x, y)


def remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Decompose `remainder` of integers by floor division.

    The converter takes the quotient's sign from a product of both operands, which may overflow.
    """
    if not (_is_integral(x) and _is_integral(y)):
        return NotImplemented
    return x - y * torch.floor_divide(x, y)


def _is_integral(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def max_of_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `max` over a dimension with indices, which has no converter."""
    return torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)


def all_of_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Decompose `all` over a dimension, which has no converter, as the minimum of floats."""
    return torch.amin((x != 0).float(), dim, keepdim) != 0


def masked_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Decompose `index_put` of one value at a mask, `x[mask] = 0`, because the converter takes no masks."""
    mask = indices[0]
    if accumulate or len(indices) > 1 or mask is None or mask.dtype != torch.bool or values.numel() != 1:
        return NotImplemented
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), values.reshape(()), x)


def bitwise_xor(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Decompose `bitwise_xor` of integers, which no layer computes, into single bits."""
    if torch.bool in (x.dtype, y.dtype):
        return NotImplemented
    dtype = torch.promote_types(x.dtype, y.dtype)
    highest = torch.iinfo(dtype).bits - 1
    # Not `torch.tensor`, which is not functional; these are folded into one constant.
    powers = torch.cat([torch.full((1,), 2**bit, dtype=dtype, device=x.device) for bit in range(highest)])

    def bits(one: torch.Tensor) -> torch.Tensor:
        """Return bits, the lowest first, then the sign; floor division is a shift."""
        shifted = torch.floor_divide(one[..., None].to(dtype), powers)
        low = shifted - 2 * torch.floor_divide(shifted, 2)
        return torch.cat([low, (one[..., None] < 0).to(dtype)], dim=-1)

    left, right = bits(x), bits(y)
    differs = left + right - 2 * left * right
    weights = torch.cat([powers, torch.full((1,), torch.iinfo(dtype).min, dtype=dtype, device=x.device)])
    return (differs * weights).sum(dim=-1, dtype=dtype)


def unfold(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    """Decompose `unfold` into slices; torch decomposes it into a strided view, which has no converter."""
    windows = (x.shape[dim] - size) // step + 1
    slices = [
        torch.ops.aten.slice.Tensor(x, dim, start, start + (windows - 1) * step + 1, step) for start in range(size)
    ]
    return torch.stack(slices, dim=-1)


def empty(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **ignored: object
) -> torch.Tensor:
    """Decompose `empty`, which has no converter, as zeros."""
    return torch.full(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def broadcast_in_dim(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """Decompose the operator of torch's reference reductions, such as `std`, which has no converter.

    Dimension i of `x` becomes `dims[i]`.
    """
    for dim in range(len(shape)):
        if dim not in dims:
            x = x.unsqueeze(dim)
    return x.expand(shape)


def decompositions(in_place: bool) -> dict[OperatorBase, Callable]:
    """Return decompositions by operator.

    Args:
        in_place: Keep cache writes for TensorRT's KVCacheUpdate layer; otherwise they become scatters.
    """
    table: dict[OperatorBase, Callable] = {
        torch.ops.aten.scatter.value: scatter_value,
        torch.ops.aten.scatter.src: scatter_empty,
        torch.ops.aten.select.int: select_from_end,
        torch.ops.aten.log1p.default: log1p,
        torch.ops.aten.slice.Tensor: last_of_dim,
        torch.ops.aten.div.Tensor: div,
        torch.ops.aten.index_put.default: masked_put,
        torch.ops.aten.max.dim: max_of_dim,
        torch.ops.aten.all.dim: all_of_dim,
        torch.ops.aten.bitwise_xor.Tensor: bitwise_xor,
        torch.ops.aten.remainder.Tensor: remainder,
        torch.ops.aten.unfold.default: unfold,
        torch.ops.aten.empty.memory_format: empty,
        torch.ops.aten.baddbmm.default: baddbmm,
        torch.ops.prims.broadcast_in_dim.default: broadcast_in_dim,
    }
    if hasattr(torch.ops.torchao, "dequantize_affine"):
        table[torch.ops.torchao.dequantize_affine.default] = dequantize_affine
    return table if in_place else {**table, torch.ops.exportable_cache.kv_cache_update.default: scatter_update}


_RESHAPES = (RESHAPE_COPY, torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def pin_reshape_sizes(graph: GraphModule) -> None:
    """State the sizes of every reshape to at most one unknown size, with -1 for that one, in place.

    `view(batch, length, -1, head_dim)` leaves the number of heads to TensorRT, which divides it out of the other sizes.
    After some layers (the sum over experts) it does not recognize that two of these are equal, and the number of heads
    stays unknown, but its attention layer needs it.
    """
    for node in graph.graph.nodes:
        # Nodes that passes of torch_tensorrt add have no traced value.
        if node.target in _RESHAPES and isinstance(node.meta.get("val"), torch.Tensor):
            sizes = node.meta["val"].shape
            if sum(not isinstance(size, int) for size in sizes) <= 1 and 0 not in sizes:
                stated = [size if isinstance(size, int) else -1 for size in sizes]
                node.args = (node.args[0], stated)
    graph.graph.eliminate_dead_code()
    graph.recompile()
