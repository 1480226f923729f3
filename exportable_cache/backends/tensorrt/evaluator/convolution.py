"""CONVOLUTION: over one to three dimensions, in groups, padded with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from .dtypes import widened
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer

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
    """Of [batch, channels, sizes ...] with the layer's own kernel [maps, channels / groups, sizes ...], accumulated in
    float32.
    """
    groups, maps, size = layer["num_groups"], layer["num_output_maps"], layer["kernel_size_nd"]
    if layer["pre_padding"] != layer["post_padding"] or layer["pre_padding"] != layer["padding_nd"]:
        raise layer.unsupported(f"is padded by {layer['pre_padding']} before and {layer['post_padding']} after")
    if len(size) not in _CONVOLVE:
        raise layer.unsupported(f"goes over {len(size)} dimensions")
    kernel = _weights(layer, "kernel").reshape(maps, layer.inputs[0].shape[1] // groups, *size)
    bias = _weights(layer, "bias")
    bias = widened(bias) if bias.numel() else None
    settings = (layer["stride_nd"], layer["padding_nd"], layer["dilation_nd"], groups)
    return lambda x: _CONVOLVE[len(size)](widened(x), widened(kernel), bias, *settings).to(x.dtype)


def _weights(layer: NetworkLayer, which: str) -> torch.Tensor:
    """Kernel or bias: the network's own, or the caller's where TensorRT cannot show them (bfloat16)."""
    weights: Any = layer[which]
    dtype = layer.inputs[0].dtype
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
