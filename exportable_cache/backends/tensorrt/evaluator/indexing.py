"""GATHER, SCATTER, ONE_HOT and NON_ZERO: tensors that address others.

An index that TensorRT leaves undefined is an error: beyond the dimension, or negative along one whose size is dynamic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .dtypes import torch_dtype
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


def _checked(layer: NetworkLayer, index: torch.Tensor, length: int, static: bool) -> torch.Tensor:
    """`index` as int64 within 0 to length - 1."""
    index = index.to(torch.int64)
    least = -length if static else 0
    outside = (index < least) | (index >= length)
    if bool(outside.any()):
        raise layer.wrong(f"uses index {index[outside][0].item()}; {least} to {length - 1} are defined")
    return torch.where(index < 0, index + length, index)


@layer_kind("GATHER", "IGatherLayer", honours=("axis", "mode", "num_elementwise_dims"), inputs=(2, 2))
def gather(layer: NetworkLayer) -> Compute:
    """DEFAULT selects rows along `axis`, ELEMENT follows an index per element, ND one tuple per result."""
    mode, axis, leading = layer["mode"], layer["axis"], layer["num_elementwise_dims"]
    static = layer.inputs[0].shape

    def rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        index = _checked(layer, index, x.shape[axis], static[axis] >= 0)
        if leading == 0:
            return x.index_select(axis, index.flatten()).reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])
        size = max(len(x), len(index))
        pairs = zip(x.expand(size, *x.shape[1:]), index.expand(size, *index.shape[1:]))
        return torch.stack(
            [
                row.index_select(axis - 1, at.flatten()).reshape([*row.shape[: axis - 1], *at.shape, *row.shape[axis:]])
                for row, at in pairs
            ]
        )

    def elements(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, axis, _checked(layer, index, x.shape[axis], static[axis] >= 0))

    def tuples(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        batch = [torch.arange(size).reshape([-1 if k == dim else 1 for k in range(index.dim() - 1)])
                 for dim, size in enumerate(index.shape[:leading])]  # fmt: skip
        return x[tuple(batch + _columns(layer, x, index, leading))]

    if leading > (mode == "DEFAULT") and mode != "ND":
        raise layer.unsupported(f"has num_elementwise_dims {leading} in mode {mode}")
    if leading and mode == "DEFAULT" and axis == 0:
        raise layer.wrong("gathers along the dimension that it handles elementwise")
    return layer.choose("mode", {"DEFAULT": rows, "ELEMENT": elements, "ND": tuples})


def _columns(layer: NetworkLayer, x: torch.Tensor, index: torch.Tensor, first: int) -> list[torch.Tensor]:
    """The indices of each dimension from `first` on, out of tuples in the last dimension of `index`."""
    static = layer.inputs[0].shape
    return [
        _checked(layer, index[..., column], x.shape[first + column], static[first + column] >= 0)
        for column in range(index.shape[-1])
    ]


@layer_kind("SCATTER", "IScatterLayer", honours=("axis", "mode"), inputs=(3, 3), same_dtype=(0, 2))
def scatter(layer: NetworkLayer) -> Compute:
    """A copy of the data with updates at the indices.

    Different values for one place are an error: their order is undefined.
    """
    axis = layer["axis"]

    def elements(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        index = _checked(layer, index, x.shape[axis], layer.inputs[0].shape[axis] >= 0)
        result = x.scatter(axis, index, updates)
        return written(result, result.gather(axis, index), updates)

    def tuples(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        places = tuple(_columns(layer, x, index, 0))
        result = x.index_put(places, updates)
        return written(result, result[places], updates)

    def written(result: torch.Tensor, found: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        if not torch.equal(found.nan_to_num(), updates.nan_to_num()):
            raise layer.wrong("writes different values to one place")
        return result

    return layer.choose("mode", {"ELEMENT": elements, "ND": tuples})


@layer_kind("ONE_HOT", "IOneHotLayer", honours=("axis",), inputs=(3, 3))
def one_hot(layer: NetworkLayer) -> Compute:
    """`values` is [off, on]; the new dimension of size `depth` stands at `axis` of the result."""
    axis = layer["axis"]

    def compute(index: torch.Tensor, values: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        index = _checked(layer, index, int(depth), static=False).unsqueeze(axis)
        sizes = list(index.shape)
        sizes[axis] = int(depth)
        off, on = values
        return torch.where(torch.zeros(sizes, dtype=torch.bool).scatter(axis, index, True), on, off)

    return compute


@layer_kind("NON_ZERO", "INonZeroLayer", honours=("indices_type",))
def non_zero(layer: NetworkLayer) -> Compute:
    """[rank of the input, number of non-zero elements], row-major."""
    dtype = torch_dtype(layer["indices_type"])
    return lambda x: torch.nonzero(x).T.to(dtype)
