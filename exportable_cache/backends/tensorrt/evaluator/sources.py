"""CONSTANT and FILL make tensors; CAST and IDENTITY hand them on; ASSERTION looks at them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .dtypes import torch_dtype
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


@layer_kind("CONSTANT", "IConstantLayer", honours=("weights", "shape"), inputs=(0, 0))
def constant(layer: NetworkLayer) -> Compute:
    """The weights of the network itself, or the caller's where TensorRT cannot show them (bfloat16)."""
    output, weights = layer.outputs[0], layer["weights"]
    if isinstance(weights, np.ndarray):
        # A copy: the network only points at memory of whoever built it.
        tensor = torch.from_numpy(weights.copy())
    else:
        tensor = _callers_constant(layer, weights)
    if tensor.dtype != output.dtype or tensor.numel() != math.prod(output.shape):
        raise layer.wrong(
            f"holds {tensor.numel()} values of {tensor.dtype}, its output {list(output.shape)} of {output.dtype}"
        )
    tensor = tensor.reshape(output.shape)
    return lambda: tensor


def _callers_constant(layer: NetworkLayer, weights: Any) -> torch.Tensor:
    # torch-tensorrt's map of weights adds what the layer is.
    names = [name for name in (layer.name, f"{layer.name} CONSTANT") if name in layer.constants]
    if not names:
        raise layer.wrong(
            f"is of {layer.outputs[0].dtype}, which TensorRT's Python cannot read; pass it in `constants` by name"
        )
    tensor = layer.constants[names[0]]
    # torch-tensorrt 2.13 keeps the tensor it was given but hands TensorRT the address of `tensor.contiguous()`.
    if not tensor.is_contiguous():
        raise layer.wrong(
            "was made from a tensor that is not contiguous: TensorRT was given the address of a freed copy"
        )
    if weights.size != tensor.numel():
        raise layer.wrong(f"has {weights.size} values, `constants` has {tensor.numel()} for it")
    return tensor.detach().clone()


@layer_kind(
    "FILL",
    "IFillLayer",
    honours=("operation", "alpha", "beta", "shape", "to_type"),
    replaced={"shape": 0, "alpha": 1, "beta": 2},
    inputs=(0, 3),
)
def fill(layer: NetworkLayer) -> Compute:
    """LINSPACE: alpha plus, along each dimension, the index times that dimension's beta."""
    layer.choose("operation", {"LINSPACE": None})
    dtype = torch_dtype(layer["to_type"])
    static_shape, alpha, beta = layer["shape"], layer["alpha"], layer["beta"]
    if layer.has_input(1) != layer.has_input(2):
        raise layer.unsupported("takes only one of alpha and beta as a tensor")
    if not layer.has_input(1) and len(layer.outputs[0].shape) != 1:
        raise layer.unsupported("has alpha and beta as numbers and an output that is not 1-D")

    def compute(
        shape: torch.Tensor | None = None, start: torch.Tensor | None = None, steps: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = static_shape if shape is None else shape.tolist()
        result = torch.full(sizes, alpha if start is None else start.item(), dtype=dtype)
        for dim, step in enumerate([beta] if steps is None else steps.tolist()):
            offsets = torch.arange(sizes[dim], dtype=dtype) * torch.tensor(step, dtype=dtype)
            result = result + offsets.reshape([-1 if other == dim else 1 for other in range(len(sizes))])
        return result

    return compute


@layer_kind("CAST", "ICastLayer", honours=("to_type",))
def cast(layer: NetworkLayer) -> Compute:
    """Floats are cut off towards zero as integers.

    A value that the integer type cannot hold is an error, not a wrap.
    """
    source, dtype = layer.inputs[0].dtype, torch_dtype(layer["to_type"])
    if dtype == torch.bool or dtype.is_floating_point or source == torch.bool:
        return lambda x: x.to(dtype)
    limits = torch.iinfo(dtype)
    if not source.is_floating_point and torch.iinfo(source).min >= limits.min and torch.iinfo(source).max <= limits.max:
        return lambda x: x.to(dtype)

    def compute(x: torch.Tensor) -> torch.Tensor:
        wide = x.double() if x.is_floating_point() else x.to(torch.int64)
        if not bool(((wide >= limits.min) & (wide <= limits.max)).all()):
            raise layer.wrong(f"casts values to {dtype} that it cannot hold")
        return x.to(dtype)

    return compute


@layer_kind("IDENTITY", "IIdentityLayer")
def identity(layer: NetworkLayer) -> Compute:
    return lambda x: x


@layer_kind("ASSERTION", "IAssertionLayer", honours=("message",))
def assertion(layer: NetworkLayer) -> Compute:
    def compute(condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not bool(condition.all()):
            raise layer.wrong(f"does not hold: {layer['message']}")
        return ()

    return compute
