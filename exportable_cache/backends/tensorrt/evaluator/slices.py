"""SLICE: start, size and stride per dimension, with what happens outside the bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer

_MODES = ("STRICT_BOUNDS", "WRAP", "CLAMP", "FILL", "REFLECT")


@layer_kind(
    "SLICE",
    "ISliceLayer",
    honours=("start", "shape", "stride", "axes", "mode"),
    replaced={"start": 1, "shape": 2, "stride": 3, "axes": 5},
    inputs=(1, 6),
)
def slice_(layer: NetworkLayer) -> Compute:
    """Each of start, size, stride and axes is a tensor or dims; without axes they name every dimension."""
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
    """The elements at `index` along one dimension."""
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
    return torch.where(inside.reshape([-1 if dim == axis else 1 for dim in range(x.dim())]), clamped, fill)
