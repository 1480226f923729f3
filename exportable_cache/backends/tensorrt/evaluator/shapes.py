"""SHAPE, SHUFFLE, SQUEEZE, UNSQUEEZE and CONCATENATION: the same elements in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


@layer_kind("SHAPE", "IShapeLayer")
def shape(layer: NetworkLayer) -> Compute:
    return lambda x: torch.tensor(x.shape, dtype=torch.int64)


@layer_kind(
    "SHUFFLE",
    "IShuffleLayer",
    honours=("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder"),
    replaced={"reshape_dims": 1},
    inputs=(1, 2),
)
def shuffle(layer: NetworkLayer) -> Compute:
    """A transpose, a reshape, a transpose.

    Permutations always name eight dimensions, of which those that exist count.
    """
    static, placeholder = layer["reshape_dims"], layer["zero_is_placeholder"]
    first, second = layer["first_transpose"], layer["second_transpose"]

    def compute(x: torch.Tensor, dims: torch.Tensor | None = None) -> torch.Tensor:
        x = _permuted(layer, x, first)
        sizes = static if dims is None else dims.tolist()
        if sizes is not None:
            if placeholder:
                sizes = [x.shape[dim] if size == 0 else size for dim, size in enumerate(sizes)]
            x = x.reshape(list(sizes))
        return _permuted(layer, x, second)

    return compute


def _permuted(layer: NetworkLayer, x: torch.Tensor, permutation: Sequence[int]) -> torch.Tensor:
    order = permutation[: x.dim()]
    if sorted(order) != list(range(x.dim())):
        raise layer.wrong(f"transposes {x.dim()} dimensions by {list(permutation)}")
    return x.permute(*order) if x.dim() else x


@layer_kind("SQUEEZE", "ISqueezeLayer", inputs=(2, 2))
def squeeze(layer: NetworkLayer) -> Compute:
    def compute(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        dims = [axis % x.dim() for axis in axes.flatten().tolist()]
        if any(x.shape[dim] != 1 for dim in dims):
            raise layer.wrong(f"removes dimensions {dims} of {list(x.shape)}, of which not all are 1")
        return x.squeeze(dims)

    return compute


@layer_kind("UNSQUEEZE", "IUnsqueezeLayer", inputs=(2, 2))
def unsqueeze(layer: NetworkLayer) -> Compute:
    """Axes count in the result."""

    def compute(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        rank = x.dim() + axes.numel()
        for axis in sorted(axis % rank for axis in axes.flatten().tolist()):
            x = x.unsqueeze(axis)
        return x

    return compute


@layer_kind("CONCATENATION", "IConcatenationLayer", honours=("axis",), inputs=(1, 2**31))
def concatenation(layer: NetworkLayer) -> Compute:
    if len({tensor.dtype for tensor in layer.inputs}) > 1:
        raise layer.wrong("joins tensors of different dtypes")
    axis = layer["axis"]
    # torch skips empty 1-D tensors whatever the rank of the others; TensorRT never inferred a shape for those.
    return lambda *tensors: torch.cat(tensors, axis)
