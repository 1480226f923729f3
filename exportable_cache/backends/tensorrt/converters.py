"""Converters of our own: the cache write, and operators that torch_tensorrt 2.13.0's converters compute otherwise than
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import kv_cache  # noqa: F401  registers the operator
from .upstream import (
    ConverterPriority,
    cast_trt_tensor,
    dynamo_tensorrt_converter,
    get_trt_tensor,
    set_layer_name,
    trt,
)

if TYPE_CHECKING:
    from .upstream import (
        ConversionContext,
    )

#: torch dtype -> TensorRT dtype, of everything our programs hold.
TRT_DTYPES = {
    torch.float32: trt.DataType.FLOAT,
    torch.float16: trt.DataType.HALF,
    torch.bfloat16: trt.DataType.BF16,
    torch.int32: trt.DataType.INT32,
    torch.int64: trt.DataType.INT64,
    torch.bool: trt.DataType.BOOL,
}
TORCH_DTYPES = {trt_dtype: dtype for dtype, trt_dtype in TRT_DTYPES.items()}


@dynamo_tensorrt_converter(
    torch.ops.exportable_cache.kv_cache_update.default, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH
)
def _kv_cache_update(
    ctx: ConversionContext, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ITensor:
    """TensorRT's KVCacheUpdate layer: in place, cache a network input and result a network output."""
    cache, update, start = args
    # It takes int32 indices only.
    start = cast_trt_tensor(ctx, start, trt.DataType.INT32, f"{name}_start")
    layer = ctx.net.add_kv_cache_update(cache, update, start, trt.KVCacheMode.LINEAR)
    if layer is None:
        raise ValueError(
            f"TensorRT refuses a KV cache update of {list(cache.shape)} {cache.dtype} by {list(update.shape)} "
            f"{update.dtype} at {list(start.shape)} {start.dtype}"
        )
    set_layer_name(layer, target, name)
    return layer.get_output(0)


@dynamo_tensorrt_converter(torch.ops.aten.where.self, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH)
def _where(
    ctx: ConversionContext, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ITensor:
    """`where` in the result's own dtype. torch_tensorrt's converter casts bfloat16, int64 and bool to int32."""
    result = ctx.current_node.meta["val"]
    dtype = TRT_DTYPES[result.dtype]
    # The layer takes no bool.
    chosen_in = trt.DataType.INT32 if dtype == trt.DataType.BOOL else dtype
    condition = _of_rank(ctx, get_trt_tensor(ctx, args[0], f"{name}_condition"), result.dim(), f"{name}_condition")
    branches = []
    for branch, given in zip(("then", "else"), args[1:], strict=True):
        tensor = cast_trt_tensor(
            ctx, get_trt_tensor(ctx, given, f"{name}_{branch}"), chosen_in, f"{name}_{branch}_cast"
        )
        branches.append(_of_rank(ctx, tensor, result.dim(), f"{name}_{branch}"))
    layer = ctx.net.add_select(condition, *branches)
    set_layer_name(layer, target, name)
    return cast_trt_tensor(ctx, layer.get_output(0), dtype, f"{name}_cast")


@dynamo_tensorrt_converter(torch.ops.aten.gather.default, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH)
def _gather(
    ctx: ConversionContext, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ITensor:
    """`gather` of any length, of a constant too. torch_tensorrt's converter is the same layer, but says that it takes
    static shapes only.
    """
    values, dim, index = args[:3]
    values, index = get_trt_tensor(ctx, values, f"{name}_values"), get_trt_tensor(ctx, index, f"{name}_index_tensor")
    layer = ctx.net.add_gather_v2(
        values, cast_trt_tensor(ctx, index, trt.DataType.INT32, f"{name}_index"), trt.GatherMode.ELEMENT
    )
    layer.axis = dim % len(values.shape)
    set_layer_name(layer, target, name)
    return layer.get_output(0)


@dynamo_tensorrt_converter(torch.ops.aten.cumsum.default, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH)
def _cumsum(
    ctx: ConversionContext, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ITensor:
    """`cumsum` as TensorRT's own layer. torch_tensorrt's converter makes a loop of it, of one static length."""
    values, dim = get_trt_tensor(ctx, args[0], f"{name}_tensor"), args[1]
    values = cast_trt_tensor(ctx, values, TRT_DTYPES[ctx.current_node.meta["val"].dtype], f"{name}_values")
    axis = get_trt_tensor(ctx, torch.tensor(dim % len(values.shape), dtype=torch.int32), f"{name}_axis")
    layer = ctx.net.add_cumulative(values, axis, trt.CumulativeOperation.SUM, False, False)
    set_layer_name(layer, target, name)
    return layer.get_output(0)


def _of_rank(ctx: ConversionContext, tensor: trt.ITensor, rank: int, name: str) -> trt.ITensor:
    """The tensor with dimensions of size 1 put in front, as broadcasting does."""
    missing = rank - len(tensor.shape)
    if missing <= 0:
        return tensor
    axes = get_trt_tensor(ctx, torch.arange(missing, dtype=torch.int64), f"{name}_axes")
    layer = ctx.net.add_unsqueeze(tensor, axes)
    layer.name = f"{name}_unsqueeze"
    return layer.get_output(0)
