"""REDUCE, TOPK, SOFTMAX, CUMULATIVE and NORMALIZATION: along dimensions, accumulated in float32 for half precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .dtypes import torch_dtype, widened
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


def _dims(layer: NetworkLayer) -> list[int]:
    """Dimensions of the bitmask `axes`."""
    return [dim for dim in range(len(layer.inputs[0].shape)) if layer["axes"] >> dim & 1]


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
    """Values, sorted, and their indices.

    Which of two equal values comes first is torch's choice, as in the eager model.
    """
    largest, dim = layer.choose("op", {"MAX": True, "MIN": False}), _one_dim(layer)
    dtype = torch_dtype(layer["indices_type"])

    def compute(x: torch.Tensor, k: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        values, indices = x.topk(layer["k"] if k is None else int(k), dim, largest=largest, sorted=True)
        return values, indices.to(dtype)

    return compute


@layer_kind("SOFTMAX", "ISoftMaxLayer", honours=("axes",))
def softmax(layer: NetworkLayer) -> Compute:
    dim = _one_dim(layer)
    return lambda x: widened(x).softmax(dim).to(x.dtype)


@layer_kind("CUMULATIVE", "ICumulativeLayer", honours=("op", "exclusive", "reverse"), inputs=(2, 2))
def cumulative(layer: NetworkLayer) -> Compute:
    """Running sums along the dimension that the second input names."""
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
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over `axes`, the variance being the biased one."""
    dims, epsilon = _dims(layer), layer["epsilon"]

    def compute(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = widened(x)
        centred = wide - wide.mean(dims, keepdim=True)
        normal = centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + epsilon)
        return (normal * widened(scale) + widened(bias)).to(x.dtype)

    return compute
