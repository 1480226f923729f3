"""Evaluate layers that sum over dimensions, among them attention, and KV_CACHE_UPDATE.

They are MATRIX_MULTIPLY, EINSUM, REDUCE, TOPK, SOFTMAX, CUMULATIVE, NORMALIZATION, CONVOLUTION, POOLING,
ROTARY_EMBEDDING, ATTENTION_INPUT and ATTENTION_OUTPUT.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from .layer import attribute_names, check_attributes, layer_kind, torch_dtype, widened

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


_OPERANDS = ("NONE", "TRANSPOSE", "VECTOR")


@layer_kind("MATRIX_MULTIPLY", "IMatrixMultiplyLayer", honours=("op0", "op1"), inputs=(2, 2), same_dtype=(0, 1))
def matrix_multiply(layer: NetworkLayer) -> Compute:
    """Evaluate MATRIX_MULTIPLY.

    The last two dimensions are a matrix, or the last one a vector; dimensions before them broadcast at equal rank.
    """
    left, right = (layer.choose(name, {operand: operand for operand in _OPERANDS}) for name in ("op0", "op1"))

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype, a, b = a.dtype, widened(a), widened(b)
        a = a.unsqueeze(-2) if left == "VECTOR" else a.mT if left == "TRANSPOSE" else a
        b = b.unsqueeze(-1) if right == "VECTOR" else b.mT if right == "TRANSPOSE" else b
        if a.dim() != b.dim():
            raise layer.wrong(f"multiplies collections of {a.dim() - 2} and {b.dim() - 2} dimensions")
        result = a @ b
        if left == "VECTOR":
            result = result.squeeze(-2)
        return (result.squeeze(-1) if right == "VECTOR" else result).to(dtype)

    return compute


@layer_kind("EINSUM", "IEinsumLayer", honours=("equation",), inputs=(1, 2**31))
def einsum(layer: NetworkLayer) -> Compute:
    """Evaluate EINSUM."""
    equation = layer["equation"]
    if len(layer.input_dtypes()) > 1:
        raise layer.wrong("multiplies tensors of different dtypes")
    return lambda *tensors: torch.einsum(equation, *map(widened, tensors)).to(tensors[0].dtype)


def _dims(layer: NetworkLayer) -> list[int]:
    """Return the dimensions in the bitmask `axes`."""
    return [dim for dim in range(len(layer.required(0).shape)) if layer["axes"] >> dim & 1]


def _one_dim(layer: NetworkLayer) -> int:
    dims = _dims(layer)
    if len(dims) != 1:
        raise layer.unsupported(f"works along dimensions {dims}")
    return dims[0]


def _product(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    for dim in dims:
        x = x.prod(dim, keepdim=True)
    return x


def _average(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    total = x.sum(dims, keepdim=True)
    count = x.numel() // max(1, total.numel())
    return total / count if x.is_floating_point() else torch.div(total, count, rounding_mode="trunc")


_REDUCTIONS = {
    "SUM": lambda x, dims: x.sum(dims, keepdim=True),
    "PROD": _product,
    "MAX": lambda x, dims: x.amax(dims, keepdim=True),
    "MIN": lambda x, dims: x.amin(dims, keepdim=True),
    "AVG": _average,
}


@layer_kind("REDUCE", "IReduceLayer", honours=("op", "axes", "keep_dims"))
def reduce(layer: NetworkLayer) -> Compute:
    """Evaluate REDUCE."""
    operation, dims, keep = layer.choose("op", _REDUCTIONS), _dims(layer), layer["keep_dims"]
    if not dims:
        raise layer.unsupported("reduces no dimension")

    def compute(x: torch.Tensor) -> torch.Tensor:
        # torch widens sums of int32 to int64.
        result = operation(widened(x), dims).to(x.dtype)
        return result if keep else result.squeeze(dims)

    return compute


@layer_kind("TOPK", "ITopKLayer", honours=("op", "k", "axes", "indices_type"), replaced={"k": 1}, inputs=(1, 2))
def topk(layer: NetworkLayer) -> Compute:
    """Evaluate TOPK: sorted values and their indices.

    The order of equal values is torch's, as in the eager model.
    """
    largest, dim = layer.choose("op", {"MAX": True, "MIN": False}), _one_dim(layer)
    dtype = torch_dtype(layer["indices_type"])

    def compute(x: torch.Tensor, k: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        values, indices = x.topk(layer["k"] if k is None else int(k), dim, largest=largest, sorted=True)
        return values, indices.to(dtype)

    return compute


@layer_kind("SOFTMAX", "ISoftMaxLayer", honours=("axes",))
def softmax(layer: NetworkLayer) -> Compute:
    """Evaluate SOFTMAX."""
    dim = _one_dim(layer)
    return lambda x: widened(x).softmax(dim).to(x.dtype)


@layer_kind("CUMULATIVE", "ICumulativeLayer", honours=("op", "exclusive", "reverse"), inputs=(2, 2))
def cumulative(layer: NetworkLayer) -> Compute:
    """Evaluate CUMULATIVE: sums along the dimension in the second input."""
    layer.choose("op", {"SUM": None})
    exclusive, reverse = layer["exclusive"], layer["reverse"]

    def compute(x: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
        dim, wide = int(axis), widened(x)
        sums = (wide.flip(dim) if reverse else wide).cumsum(dim)
        if exclusive:
            sums = torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums.narrow(dim, 0, x.shape[dim] - 1)], dim)
        return (sums.flip(dim) if reverse else sums).to(x.dtype)

    return compute


@layer_kind(
    "NORMALIZATION",
    "INormalizationLayer",
    honours=("axes", "epsilon", "is_v2"),  # the second version differs in the shape of scale and bias of groups only
    expects={"num_groups": 1},
    inputs=(3, 3),
)
def normalization(layer: NetworkLayer) -> Compute:
    """Evaluate NORMALIZATION: (x - mean) / sqrt(biased variance + epsilon) * scale + bias over `axes`."""
    dims, epsilon = _dims(layer), layer["epsilon"]

    def compute(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        centred = wide - wide.mean(dims, keepdim=True)
        normal = centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + epsilon)
        return (normal * widened(scale) + widened(bias)).to(x.dtype)

    return compute


_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@layer_kind(
    "CONVOLUTION",
    "IConvolutionLayer",
    honours=(
        "kernel", "bias", "kernel_size_nd", "num_output_maps", "num_groups", "stride_nd", "dilation_nd", "padding_nd",
        "pre_padding", "post_padding",
    ),
    expects={"padding_mode": "EXPLICIT_ROUND_DOWN"},
)  # fmt: skip
def convolution(layer: NetworkLayer) -> Compute:
    """Evaluate CONVOLUTION of [batch, channels, sizes ...], accumulated in float32.

    The kernel is [maps, channels / groups, sizes ...].
    """
    groups, maps, size = layer["num_groups"], layer["num_output_maps"], layer["kernel_size_nd"]
    if layer["pre_padding"] != layer["post_padding"] or layer["pre_padding"] != layer["padding_nd"]:
        raise layer.unsupported(f"is padded by {layer['pre_padding']} before and {layer['post_padding']} after")
    if len(size) not in _CONVOLVE:
        raise layer.unsupported(f"goes over {len(size)} dimensions")
    kernel = _weights(layer, "kernel").reshape(maps, layer.required(0).shape[1] // groups, *size)
    given = _weights(layer, "bias")
    bias = widened(given) if given.numel() else None
    settings = (layer["stride_nd"], layer["padding_nd"], layer["dilation_nd"], groups)
    return lambda x: _CONVOLVE[len(size)](widened(x), widened(kernel), bias, *settings).to(x.dtype)


def _weights(layer: NetworkLayer, which: str) -> torch.Tensor:
    """Return kernel or bias of the network, or the caller's if TensorRT cannot show them (bfloat16)."""
    weights: Any = layer[which]
    dtype = layer.required(0).dtype
    if isinstance(weights, np.ndarray):
        tensor = torch.from_numpy(weights.copy())
    elif not weights.size:
        tensor = torch.zeros(0, dtype=dtype)
    elif (name := f"{layer.name} {which.upper()}") in layer.constants:
        tensor = layer.constants[name].detach().clone()
        if weights.size != tensor.numel():
            raise layer.wrong(f"has a {which} of {weights.size} values, `constants` has {tensor.numel()} for it")
    else:
        raise layer.wrong(
            f"has a {which} of {dtype}, which TensorRT's Python cannot read; pass it in `constants` as {name!r}"
        )
    if tensor.numel() and tensor.dtype != dtype:
        raise layer.wrong(f"has a {which} of {tensor.dtype} for an input of {dtype}")
    return tensor


_POOLS: dict[int, tuple[Compute, Compute]] = {2: (F.avg_pool2d, F.max_pool2d), 3: (F.avg_pool3d, F.max_pool3d)}


@layer_kind(
    "POOLING",
    "IPoolingLayer",
    honours=(
        "type", "window_size_nd", "stride_nd", "padding_nd", "pre_padding", "post_padding",
        "average_count_excludes_padding",
    ),
    expects={"padding_mode": "EXPLICIT_ROUND_DOWN", "blend_factor": 0.0},
)  # fmt: skip
def pooling(layer: NetworkLayer) -> Compute:
    """Evaluate POOLING of [batch, channels, sizes ...]: the mean in float32, or the maximum, of each window."""
    size, stride, padding = layer["window_size_nd"], layer["stride_nd"], layer["padding_nd"]
    if padding != layer["pre_padding"] or padding != layer["post_padding"]:
        raise layer.unsupported(f"is padded by {layer['pre_padding']} before and {layer['post_padding']} after")
    if len(size) not in _POOLS:
        raise layer.unsupported(f"goes over {len(size)} dimensions")
    average, maximum = _POOLS[len(size)]
    counts = not layer["average_count_excludes_padding"]
    formulas: dict[str, Compute] = {
        "AVERAGE": lambda x: average(x, size, stride, padding, count_include_pad=counts),
        "MAX": lambda x: maximum(x, size, stride, padding),
    }
    pool = layer.choose("type", formulas)
    return lambda x: pool(widened(x)).to(x.dtype)


@layer_kind(
    "ROTARY_EMBEDDING",
    "IRotaryEmbeddingLayer",
    honours=("interleaved", "rotary_embedding_dim"),
    inputs=(3, 4),
    same_dtype=(0, 1, 2),
)
def rotary_embedding(layer: NetworkLayer) -> Compute:
    """Evaluate ROTARY_EMBEDDING: rotate pairs of the first `rotary_embedding_dim` values of each head, 0 for all.

    Shapes are x [batch, heads, length, dim], and cosines and sines [batch, length, rotated / 2]. The values of a pair
    are half of the rotated ones apart, or neighbours if interleaved. Each product and sum is rounded, as in the kernels
    that TensorRT-RTX 1.5 writes for the layer.
    """
    interleaved, given = layer["interleaved"], layer["rotary_embedding_dim"]
    if layer.has_input(3):
        raise layer.unsupported("has indices of positions")

    def compute(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = given or x.shape[-1]
        if cos.shape != sin.shape or cos.shape != (x.shape[0], x.shape[2], size // 2):
            raise layer.wrong(f"has tables of {list(cos.shape)} and {list(sin.shape)} for values of {list(x.shape)}")
        part, rest = x[..., :size], x[..., size:]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
        return torch.cat([joined, rest], dim=-1)

    return compute


# `decomposable` decides which kernels run, not what they compute.
_HONOURED = (
    "mask",
    "norm_op",
    "causal",
    "causal_kind",
    "decomposable",
    "metadata",
    "name",
    "num_inputs",
    "num_outputs",
)
_EXPECTED = {
    "query_form": "PADDED_BHND",
    "key_value_form": "PADDED_BHND",
    "query_lengths": None,
    "key_value_lengths": None,
    "normalization_quantize_scale": None,
    "num_ranks": 1,
}
# Reading it raises an error in the log unless a scale is set, which is refused.
_UNREADABLE = ("normalization_quantize_to_type",)


@layer_kind("ATTENTION_INPUT", "IAttentionInputLayer", honours=("attention",), inputs=(3, 8), same_dtype=(0, 1, 2))
def attention_input(layer: NetworkLayer) -> Compute:
    """Evaluate ATTENTION_INPUT: all of attention over query [batch, heads, q, dim], key, value and mask.

    Key and value are [batch, kv_heads, kv, dim]. It computes in float32 and rounds once, as fused kernels do; other
    kernels may round scores and weights.
    """
    settings = _settings(layer, layer["attention"])
    causal = settings.get("causal_kind", "UPPER_LEFT" if settings["causal"] else "NONE")
    normalise = {"SOFTMAX": True, "NONE": False}.get(settings["norm_op"])
    if normalise is None or causal not in ("NONE", "UPPER_LEFT", "LOWER_RIGHT"):
        raise layer.unsupported(f"has norm_op {settings['norm_op']} and causal_kind {causal}")
    if (settings["mask"] is not None) != layer.has_input(3):
        raise layer.wrong(f"has {len(layer.inputs)} inputs and {'a' if settings['mask'] is not None else 'no'} mask")
    if any(layer.has_input(index) for index in range(4, len(layer.inputs))):
        raise layer.unsupported(f"has {len(layer.inputs)} inputs")
    if settings["mask"] is not None and causal != "NONE":
        raise layer.wrong("is causal and has a mask, of which TensorRT keeps one only")
    if layer.has_input(3) and layer.required(3).dtype not in (torch.bool, layer.required(0).dtype):
        raise layer.wrong(f"has a mask of {layer.required(3).dtype} for queries of {layer.required(0).dtype}")

    def compute(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *absent: None
    ) -> torch.Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads:
            raise layer.wrong(f"has {heads} query heads for {kv_heads} key heads")
        groups = heads // kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query.float() @ key.float().mT
        if mask is not None:
            if mask.shape[2:] != scores.shape[2:]:
                raise layer.wrong(f"has a mask of {list(mask.shape)} for scores of {list(scores.shape)}")
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
        elif causal != "NONE":
            q, kv = scores.shape[2:]
            offset = kv - q if causal == "LOWER_RIGHT" else 0
            later = torch.arange(kv) > torch.arange(q)[:, None] + offset
            scores = scores.masked_fill(later, -math.inf)
        weights = scores.softmax(-1) if normalise else scores
        return (weights @ value.float()).to(query.dtype)

    return compute


def _settings(layer: NetworkLayer, attention: Any) -> dict[str, Any]:
    """Return the attributes of the IAttention, after checking each."""
    names = attribute_names(type(attention), _UNREADABLE)
    settings = {name: getattr(attention, name) for name in names}
    settings = {name: value.name if hasattr(type(value), "__members__") else value for name, value in settings.items()}
    check_attributes(layer, settings, _HONOURED, _EXPECTED)
    return settings


@layer_kind("ATTENTION_OUTPUT", "IAttentionOutputLayer", honours=("attention",))
def attention_output(layer: NetworkLayer) -> Compute:
    """Evaluate ATTENTION_OUTPUT, the identity, because ATTENTION_INPUT computes the result."""
    return lambda x: x


@layer_kind(
    "KV_CACHE_UPDATE",
    "IKVCacheUpdateLayer",
    expects={"cache_mode": "LINEAR", "update_form": "PADDED_BHND", "update_lengths": None},
    inputs=(3, 3),
    same_dtype=(0, 1),
)
def kv_cache_update(layer: NetworkLayer) -> Compute:
    """Evaluate KV_CACHE_UPDATE: `cache[i, :, start[i] + s] = update[i, :, s]`.

    Shapes are cache [batch, heads, capacity, dim], update [batch, heads, q, dim], start [batch]. A write past the end
    is an error here, although TensorRT checks no bound at run time.
    """

    def compute(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        length, capacity = update.shape[2], cache.shape[2]
        if start.shape != (len(cache),) or update.shape[:2] != cache.shape[:2] or update.shape[3:] != cache.shape[3:]:
            raise layer.wrong(f"writes {list(update.shape)} at {list(start.shape)} into {list(cache.shape)}")
        result = cache.clone()
        for row, first in enumerate(start.tolist()):
            if not 0 <= first <= capacity - length:
                raise layer.wrong(f"writes {length} tokens at {first} into a cache of {capacity} slots")
            result[row, :, first : first + length] = update[row]
        return result

    return compute


def check_aliases(layers: Sequence[NetworkLayer], inputs: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """Return the input name by output name of every cache that is updated in place.

    Raises:
        VerificationError: If a cache is not a network input, its update not a network output, or another layer reads
            the cache: it shares memory with the update, so which state a reader sees is undefined.
    """
    aliases: dict[str, str] = {}
    for layer in layers:
        if layer.kind != "KV_CACHE_UPDATE":
            continue
        cache, updated = layer.required(0).name, layer.outputs[0].name
        if cache not in inputs or updated not in outputs:
            raise layer.wrong("updates a cache that is not a network input, or whose update is not a network output")
        readers = [(other, index) for other in layers for index, t in enumerate(other.inputs) if t and t.name == cache]
        if len(readers) > 1:
            other = next((other for other, index in readers if other is not layer), layer)
            raise layer.wrong(f"updates {cache!r} in place while {other} reads it")
        aliases[updated] = cache
    return aliases
