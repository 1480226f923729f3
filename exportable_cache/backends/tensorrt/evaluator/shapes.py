"""Evaluate layers that move elements: SHAPE, SHUFFLE, CONCATENATION, SLICE, GATHER, SCATTER and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .layer import layer_kind, torch_dtype

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


def _checked(layer: NetworkLayer, index: torch.Tensor, length: int, static: bool) -> torch.Tensor:
    """Return `index` as int64 from 0 to length - 1."""
    index = index.to(torch.int64)
    least = -length if static else 0
    outside = (index < least) | (index >= length)
    if bool(outside.any()):
        raise layer.wrong(f"uses index {index[outside][0].item()}; {least} to {length - 1} are defined")
    return torch.where(index < 0, index + length, index)


@layer_kind("GATHER", "IGatherLayer", honours=("axis", "mode", "num_elementwise_dims"), inputs=(2, 2))
def gather(layer: NetworkLayer) -> Compute:
    """Evaluate GATHER: DEFAULT selects rows along `axis`, ELEMENT has an index per element, ND a tuple per result."""
    mode, axis, leading = layer["mode"], layer["axis"], layer["num_elementwise_dims"]
    static = layer.required(0).shape

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
        raise layer.wrong("gathers along a dimension that is elementwise")
    return layer.choose("mode", {"DEFAULT": rows, "ELEMENT": elements, "ND": tuples})


def _columns(layer: NetworkLayer, x: torch.Tensor, index: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Return the indices of each dimension from `first` on, from tuples in the last dimension of `index`."""
    static = layer.required(0).shape
    return [
        _checked(layer, index[..., column], x.shape[first + column], static[first + column] >= 0)
        for column in range(index.shape[-1])
    ]


@layer_kind("SCATTER", "IScatterLayer", honours=("axis", "mode"), inputs=(3, 3), same_dtype=(0, 2))
def scatter(layer: NetworkLayer) -> Compute:
    """Evaluate SCATTER: a copy of the data with updates at the indices.

    Different values at one index are an error, because their order is undefined.
    """
    axis = layer["axis"]

    def elements(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        index = _checked(layer, index, x.shape[axis], layer.required(0).shape[axis] >= 0)
        result = x.scatter(axis, index, updates)
        return written(result, result.gather(axis, index), updates)

    def tuples(x: torch.Tensor, index: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        columns = tuple(_columns(layer, x, index, 0))
        result = x.index_put(columns, updates)
        return written(result, result[columns], updates)

    def written(result: torch.Tensor, found: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
        if not torch.equal(found.nan_to_num(), updates.nan_to_num()):
            raise layer.wrong("writes different values to one index")
        return result

    return layer.choose("mode", {"ELEMENT": elements, "ND": tuples})


@layer_kind("ONE_HOT", "IOneHotLayer", honours=("axis",), inputs=(3, 3))
def one_hot(layer: NetworkLayer) -> Compute:
    """Evaluate ONE_HOT: `values` is [off, on]; a dimension of size `depth` is inserted at `axis`."""
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
    """Evaluate NON_ZERO: [rank of the input, number of nonzero elements], row-major."""
    dtype = torch_dtype(layer["indices_type"])
    return lambda x: torch.nonzero(x).T.to(dtype)


@layer_kind("SHAPE", "IShapeLayer")
def shape(layer: NetworkLayer) -> Compute:
    """Evaluate SHAPE."""
    return lambda x: torch.tensor(x.shape, dtype=torch.int64)


@layer_kind(
    "SHUFFLE",
    "IShuffleLayer",
    honours=("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder"),
    replaced={"reshape_dims": 1},
    inputs=(1, 2),
)
def shuffle(layer: NetworkLayer) -> Compute:
    """Evaluate SHUFFLE: a transpose, a reshape, a transpose.

    Permutations always have eight entries, of which as many as the rank count.
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
    """Evaluate SQUEEZE."""

    def compute(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        dims = [axis % x.dim() for axis in axes.flatten().tolist()]
        if any(x.shape[dim] != 1 for dim in dims):
            raise layer.wrong(f"removes dimensions {dims} of {list(x.shape)}, of which not all are 1")
        return x.squeeze(dims)

    return compute


@layer_kind("UNSQUEEZE", "IUnsqueezeLayer", inputs=(2, 2))
def unsqueeze(layer: NetworkLayer) -> Compute:
    """Evaluate UNSQUEEZE; axes refer to the result."""

    def compute(x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
        rank = x.dim() + axes.numel()
        for axis in sorted(axis % rank for axis in axes.flatten().tolist()):
            x = x.unsqueeze(axis)
        return x

    return compute


@layer_kind("CONCATENATION", "IConcatenationLayer", honours=("axis",), inputs=(1, 2**31))
def concatenation(layer: NetworkLayer) -> Compute:
    """Evaluate CONCATENATION."""
    if len(layer.input_dtypes()) > 1:
        raise layer.wrong("joins tensors of different dtypes")
    axis = layer["axis"]
    # torch skips empty 1-D tensors at any rank of the others; TensorRT infers no shape for those.
    return lambda *tensors: torch.cat(tensors, axis)


_MODES = ("STRICT_BOUNDS", "WRAP", "CLAMP", "FILL", "REFLECT")


@layer_kind(
    "SLICE",
    "ISliceLayer",
    honours=("start", "shape", "stride", "axes", "mode"),
    replaced={"start": 1, "shape": 2, "stride": 3, "axes": 5},
    inputs=(1, 6),
)
def slice_(layer: NetworkLayer) -> Compute:
    """Evaluate SLICE: start, size, stride and axes are tensors or dims; by default axes are all dimensions."""
    mode = layer.choose("mode", {mode: mode for mode in _MODES})
    if layer.has_input(4) != (mode == "FILL"):
        raise layer.wrong(f"has mode {mode} and {'a' if layer.has_input(4) else 'no'} fill value")
    settings = ("start", "shape", "stride")
    for index, name in enumerate(settings, 1):
        if layer[name] is None and not layer.has_input(index):
            raise layer.wrong(f"has no {name}")

    def compute(x: torch.Tensor, *given: torch.Tensor | None) -> torch.Tensor:
        given = (*given, *[None] * (5 - len(given)))
        start, size, stride = (
            layer[name] if tensor is None else tensor.flatten().tolist() for name, tensor in zip(settings, given[:3])
        )
        axes = layer["axes"] if given[4] is None else given[4].flatten().tolist()
        axes = range(x.dim()) if axes is None else [axis % x.dim() for axis in axes]
        if not len(axes) == len(start) == len(size) == len(stride):
            raise layer.wrong(
                f"has {len(start)} starts, {len(size)} sizes and {len(stride)} strides for {len(axes)} dimensions"
            )
        for axis, first, count, step in zip(axes, start, size, stride):
            x = _along(layer, x, axis, first + step * torch.arange(count), mode, given[3])
        return x

    return compute


def _along(
    layer: NetworkLayer, x: torch.Tensor, axis: int, index: torch.Tensor, mode: str, fill: torch.Tensor | None
) -> torch.Tensor:
    """Return the elements at `index` along one dimension."""
    length = x.shape[axis]
    inside = (index >= 0) & (index < length)
    if bool(inside.all()):
        return x.index_select(axis, index)
    if mode == "STRICT_BOUNDS":
        raise layer.wrong(f"reads index {index[~inside][0].item()} of dimension {axis}, which has {length}")
    if length == 0:
        raise layer.wrong(f"reads outside dimension {axis}, which is empty")
    if mode == "WRAP":
        return x.index_select(axis, index.remainder(length))
    if mode == "REFLECT":
        # Without repeating the ends: -1 reads 1, `length` reads `length - 2`.
        index = index.remainder(max(1, 2 * (length - 1)))
        return x.index_select(axis, torch.minimum(index, (2 * (length - 1) - index).clamp(min=0)))
    clamped = x.index_select(axis, index.clamp(0, length - 1))
    if mode == "CLAMP":
        return clamped
    assert fill is not None
    return torch.where(inside.reshape([-1 if dim == axis else 1 for dim in range(x.dim())]), clamped, fill)
