"""Converters that need one layer for an operator, where torch_tensorrt's need several.

torch_tensorrt computes shapes in the network, and adds constants and casts for every operator again. These converters
know the traced shapes, share small constants, and leave other cases to torch_tensorrt's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .simplify import slice_arguments
from .upstream import ConverterPriority, cast_trt_tensor, dynamo_tensorrt_converter, set_layer_name, trt

if TYPE_CHECKING:
    from .upstream import ConversionContext

#: TensorRT dtypes by torch dtype.
TRT_DTYPES = {
    torch.float32: trt.DataType.FLOAT,
    torch.float16: trt.DataType.HALF,
    torch.bfloat16: trt.DataType.BF16,
    torch.int32: trt.DataType.INT32,
    torch.int64: trt.DataType.INT64,
    torch.bool: trt.DataType.BOOL,
    torch.int8: trt.DataType.INT8,
}
TORCH_DTYPES = {trt_dtype: dtype for dtype, trt_dtype in TRT_DTYPES.items()}

#: Constants of at most this many elements are shared by their values.
_FEW = 64
_aten = torch.ops.aten


def converts(operator: Any, validator: Callable[..., bool] | None = None) -> Callable[[Callable], Callable]:
    """Return a decorator that registers a converter, which is used before torch_tensorrt's.

    The converter gets the context, the operator's arguments and keyword arguments, and a name for its layers. It
    returns the last layer, which is then named after the node, or a tensor.

    Args:
        operator: The operator.
        validator: Returns True for the nodes that it converts; all by default.
    """

    def decorate(convert: Callable) -> Callable:
        @dynamo_tensorrt_converter(
            operator, capability_validator=validator, supports_dynamic_shapes=True, priority=ConverterPriority.HIGH
        )
        def add(ctx: ConversionContext, target: Any, args: Any, kwargs: Any, name: str) -> trt.ITensor:
            made = convert(ctx, args, kwargs, name)
            if isinstance(made, trt.ITensor):
                return made
            set_layer_name(made, target, name)
            return made.get_output(0)

        return convert

    return decorate


def named(layer: trt.ILayer, name: str) -> trt.ITensor:
    """Name a layer, and return its output."""
    layer.name = name
    return layer.get_output(0)


def reshaped(ctx: ConversionContext, tensor: trt.ITensor, sizes: Sequence[int], name: str) -> trt.ITensor:
    """Return a tensor with other sizes, of which one may be -1."""
    layer = ctx.net.add_shuffle(tensor)
    layer.reshape_dims = sizes
    return named(layer, name)


def add_constant(
    ctx: ConversionContext,
    tensor: torch.Tensor,
    name: str,
    shape: Sequence[int] | None = None,
    dtype: trt.DataType | None = None,
) -> trt.ITensor:
    """Add a constant layer without copying the tensor, or return an equal one if it is small.

    Args:
        ctx: Context of the conversion, which keeps the tensor alive.
        tensor: Values; contiguous ones are not copied.
        name: Name of the layer.
        shape: Shape in the network; that of the tensor by default.
        dtype: Dtype in the network, for 4-bit integers; that of the tensor by default.
    """
    tensor = tensor.detach().contiguous()
    shape = list(tensor.shape) if shape is None else list(shape)
    dtype = dtype or TRT_DTYPES[tensor.dtype]
    # By address for large ones, such as a table that is tied to the head; the context keeps them alive.
    content = bytes(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() <= _FEW else tensor.data_ptr()
    shared = vars(ctx).setdefault("shared_constants", {})
    key = (dtype, tuple(shape), content)
    if key not in shared:
        ctx.record_weight(f"{name} CONSTANT", tensor)
        weights = trt.Weights(dtype, tensor.data_ptr(), math.prod(shape))
        shared[key] = named(ctx.net.add_constant(shape, weights), name)
    return shared[key]


def as_tensor(ctx: ConversionContext, value: Any, name: str) -> trt.ITensor:
    """Return a tensor of the network; a constant of the graph, such as a table of an encoder's positions, is added."""
    return value if isinstance(value, trt.ITensor) else add_constant(ctx, value, f"{name}_constant")


def has_constant(ctx: ConversionContext, tensor: torch.Tensor) -> bool:
    """Return True if a large tensor is a constant of the network already, in its own shape."""
    key = (TRT_DTYPES.get(tensor.dtype), tuple(tensor.shape), tensor.data_ptr())
    return key in vars(ctx).get("shared_constants", {})


def shared_cast(ctx: ConversionContext, tensor: trt.ITensor, dtype: trt.DataType, name: str) -> trt.ITensor:
    """Return a tensor in a dtype, cast once for all of its readers."""
    if tensor.dtype == dtype:
        return tensor
    shared = vars(ctx).setdefault("shared_casts", {})
    key = (tensor.name, dtype)
    if key not in shared:
        shared[key] = cast_trt_tensor(ctx, tensor, dtype, name)
    return shared[key]


def _operand(ctx: ConversionContext, value: Any, dtype: torch.dtype, rank: int, name: str) -> trt.ITensor:
    """Return a number, constant or tensor as a tensor of a dtype and rank."""
    if not isinstance(value, trt.ITensor):
        tensor = torch.as_tensor(value).to(dtype)
        return add_constant(ctx, tensor, name, [*[1] * (rank - tensor.dim()), *tensor.shape])
    value = shared_cast(ctx, value, TRT_DTYPES[dtype], f"{name}_cast")
    shape = tuple(value.shape)
    if len(shape) == rank:
        return value
    return reshaped(ctx, value, (*[1] * (rank - len(shape)), *shape), f"{name}_of_rank")


def _traced(node: Any) -> Any:
    """Return the traced tensor of a node, or None."""
    found = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _dynamic(shape: Sequence[Any]) -> int:
    return sum(not isinstance(size, int) for size in shape)


def _takes_elementwise(node: Any, settings: Any = None) -> bool:
    """Return True if both operands are numbers or tensors whose rank a reshape with one unknown size can raise."""
    result = _traced(node)
    if (
        result is None
        or result.dtype not in TRT_DTYPES
        or result.dtype == torch.bool
        or node.kwargs.get("alpha", 1) != 1
    ):
        return False
    tensors = [_traced(one) for one in node.args[:2] if isinstance(one, torch.fx.Node)]
    if any(one is None or one.dim() == 0 or one.dtype == torch.bool for one in tensors):
        return False
    return result.dim() > 0 and all(one.dim() == result.dim() or _dynamic(one.shape) <= 1 for one in tensors)


def _register(target: Any, operation: str, validator: Callable = _takes_elementwise) -> None:
    @converts(target, validator)
    def convert(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
        result = ctx.current_node.meta["val"]
        operands = [
            _operand(ctx, one, result.dtype, result.dim(), f"{name}_{which}")
            for which, one in zip(("left", "right"), args[:2], strict=True)
        ]
        return ctx.net.add_elementwise(*operands, getattr(trt.ElementWiseOperation, operation))


def _divides_floats(node: Any, settings: Any = None) -> bool:
    tensors = [_traced(one) for one in node.args[:2] if isinstance(one, torch.fx.Node)]
    plain = not node.kwargs.get("rounding_mode")
    return plain and _takes_elementwise(node) and all(one.is_floating_point() for one in tensors if one is not None)


_register(_aten.add.Tensor, "SUM")
_register(_aten.sub.Tensor, "SUB")
_register(_aten.mul.Tensor, "PROD")
_register(_aten.div.Tensor, "DIV", _divides_floats)


def _is_square(node: Any, settings: Any = None) -> bool:
    result, source = _traced(node), _traced(node.args[0])
    same = result is not None and source is not None and result.dtype == source.dtype
    return bool(same and node.args[1] == 2 and result.is_floating_point())


@converts(_aten.pow.Tensor_Scalar, _is_square)
def _square(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert a square to a product, as torch computes it."""
    source = as_tensor(ctx, args[0], name)
    return ctx.net.add_elementwise(source, source, trt.ElementWiseOperation.PROD)


def _keeps_one_unknown(node: Any, settings: Any = None) -> bool:
    result, source = _traced(node), _traced(node.args[0])
    return result is not None and source is not None and source.dim() > 0 and _dynamic(result.shape) <= 1


@converts(_aten.unsqueeze.default, _keeps_one_unknown)
def _unsqueeze(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a reshape."""
    sizes = [size if isinstance(size, int) else -1 for size in ctx.current_node.meta["val"].shape]
    layer = ctx.net.add_shuffle(as_tensor(ctx, args[0], name))
    layer.reshape_dims = sizes
    return layer


@converts(torch.ops.exportable_cache.shuffled.default)
def _shuffled(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a SHUFFLE layer."""
    source, before, sizes, after = args
    layer = ctx.net.add_shuffle(as_tensor(ctx, source, name))
    layer.first_transpose, layer.reshape_dims, layer.second_transpose = before, sizes, after
    return layer


@converts(torch.ops.exportable_cache.swapped_halves.default)
def _swapped_halves(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a gather of halves: [..., 2, dim / 2] in the order 1, 0."""
    source = as_tensor(ctx, args[0], name)
    half = source.shape[-1] // 2
    layer = ctx.net.add_slice(source, (half,), (2 * half,), (1,))
    layer.axes = (len(source.shape) - 1,)
    layer.mode = trt.SampleMode.WRAP
    return layer


@converts(torch.ops.exportable_cache.rotated.default)
def _rotated(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a ROTARY_EMBEDDING layer of halves, over all of the last dimension."""
    tensors = (as_tensor(ctx, one, f"{name}_{of}") for one, of in zip(args, ("source", "cos", "sin"), strict=True))
    return ctx.net.add_rotary_embedding(*tensors, False, 0)


@converts(torch.ops.exportable_cache.negated_first_half.default)
def _negated_first_half(
    ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> trt.ILayer:
    """Convert to a product with -1 and 1."""
    source, result = as_tensor(ctx, args[0], name), ctx.current_node.meta["val"]
    signs = torch.ones(result.shape[-1], dtype=result.dtype)
    signs[: len(signs) // 2] = -1
    right = add_constant(ctx, signs, f"{name}_signs", [*[1] * (result.dim() - 1), len(signs)])
    return ctx.net.add_elementwise(source, right, trt.ElementWiseOperation.PROD)


def _is_static_slice(node: Any, settings: Any = None) -> bool:
    """Return True if a slice takes a fixed part of a dimension of fixed size."""
    source, result = _traced(node.args[0]), _traced(node)
    if source is None or result is None or source.dtype not in TRT_DTYPES or source.dim() == 0:
        return False
    _, dim, *limits = slice_arguments(node.args)
    fixed = all(isinstance(one, (int, type(None))) for one in limits)
    return fixed and isinstance(source.shape[dim], int) and isinstance(result.shape[dim], int) and result.shape[dim] > 0


@converts(_aten.slice.Tensor, _is_static_slice)
def _slice(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ILayer:
    """Convert to a SLICE layer along one dimension."""
    source, dim, start, end, step = slice_arguments(args)
    source = as_tensor(ctx, source, name)
    dim, size = dim % len(source.shape), source.shape[dim]
    first = slice(start, end).indices(size)[0]
    layer = ctx.net.add_slice(source, (first,), (ctx.current_node.meta["val"].shape[dim],), (step,))
    layer.axes = (dim,)
    return layer


def _has_mask_alone(node: Any, settings: Any = None) -> bool:
    """Return True if attention has an additive mask of four dimensions in the query's dtype, and nothing else."""
    query, mask = _traced(node.args[0]), _traced(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"))
    others = node.args[4:] or node.kwargs.get("dropout_p") or node.kwargs.get("is_causal")
    if query is None or mask is None or others:
        return False
    return mask.dtype == query.dtype and mask.dim() == query.dim() == 4 and isinstance(query.shape[-1], int)


@converts(_aten.scaled_dot_product_attention.default, _has_mask_alone)
def _attention(ctx: ConversionContext, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> trt.ITensor:
    """Convert to TensorRT's attention layer over a scaled query, or in 16 bits to layers with a float32 softmax."""
    query, key, value = args[:3]
    mask = args[3] if len(args) > 3 else kwargs["attn_mask"]
    dtype = ctx.current_node.meta["val"].dtype
    scale = kwargs.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale != 1:
        factor = _operand(ctx, scale, dtype, 4, f"{name}_scale")
        query = ctx.net.add_elementwise(query, factor, trt.ElementWiseOperation.PROD).get_output(0)
    if dtype != torch.float32:
        return _attention_in_16_bits(ctx, query, key, value, mask, name)
    attention = ctx.net.add_attention(query, key, value, trt.AttentionNormalizationOp.SOFTMAX, False)
    attention.name = name
    attention.mask = _operand(ctx, mask, dtype, 4, f"{name}_mask")
    # Because float32 prefill and some head sizes have no fused kernel.
    attention.decomposable = True
    return attention.get_output(0)


def _attention_in_16_bits(
    ctx: ConversionContext, query: trt.ITensor, key: trt.ITensor, value: trt.ITensor, mask: trt.ITensor, name: str
) -> trt.ITensor:
    """Attend in float16 or bfloat16, with scores that are masked and normalized in float32.

    TensorRT-RTX 1.5 fuses these layers into the kernels that it has for its attention layer. For the layer itself in 16
    bits, the kernel of a step computes the softmax in 16 bits, and that of a float16 prompt adds in 16 bits; for these
    layers, both use float32. Heads of keys are repeated, because the builder fuses neither broadcast nor folded heads.
    """
    net, none = ctx.net, trt.MatrixOperation.NONE
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated_heads(ctx, one, groups, f"{name}_{of}") for one, of in ((key, "key"), (value, "value")))
    scores = net.add_matrix_multiply(query, none, key, trt.MatrixOperation.TRANSPOSE).get_output(0)
    scores = cast_trt_tensor(ctx, scores, trt.DataType.FLOAT, f"{name}_scores")
    addend = _operand(ctx, mask, torch.float32, 4, f"{name}_mask")
    masked = net.add_elementwise(scores, addend, trt.ElementWiseOperation.SUM).get_output(0)
    softmax = net.add_softmax(masked)
    softmax.axes = 1 << 3
    weights = cast_trt_tensor(ctx, softmax.get_output(0), value.dtype, f"{name}_weights")
    layer = net.add_matrix_multiply(weights, none, value, none)
    return named(layer, name)


def _repeated_heads(ctx: ConversionContext, tensor: trt.ITensor, groups: int, name: str) -> trt.ITensor:
    """Repeat each head: [batch, kv_heads, slots, dim] -> [batch, kv_heads * groups, slots, dim]."""
    if groups == 1:
        return tensor
    batch, heads, slots, dim = tensor.shape
    split = reshaped(ctx, tensor, (batch, heads, 1, slots, dim), f"{name}_heads")
    repeated: trt.ILayer
    if -1 in (batch, slots):
        # A concatenation, because a slice needs sizes that are known.
        repeated = ctx.net.add_concatenation([split] * groups)
        repeated.axis = 2
    else:
        start, sizes = (0,) * 5, (batch, heads, groups, slots, dim)
        repeated = ctx.net.add_slice(split, start, sizes, (1, 1, 0, 1, 1))
    return reshaped(ctx, named(repeated, f"{name}_repeated"), (batch, heads * groups, slots, dim), f"{name}_joined")
