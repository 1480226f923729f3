"""Evaluate ELEMENTWISE, UNARY, ACTIVATION, SELECT, CONSTANT, FILL, CAST, QUANTIZE, DEQUANTIZE, IDENTITY, ASSERTION."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....models.rounding import float4_values
from ..quantized import unpacked
from .layer import layer_kind, torch_dtype, widened

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the quotient; for integers it is truncated."""
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


_BINARY = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "DIV": _divide,
    "POW": torch.pow,
    "FLOOR_DIV": _floor_divide,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
}

_UNARY = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "TAN": torch.tan,
    "SINH": torch.sinh,
    "COSH": torch.cosh,
    "ASIN": torch.asin,
    "ACOS": torch.acos,
    "ATAN": torch.atan,
    "ASINH": torch.asinh,
    "ACOSH": torch.acosh,
    "ATANH": torch.atanh,
    "CEIL": torch.ceil,
    "FLOOR": torch.floor,
    "ERF": torch.erf,
    "NOT": torch.logical_not,
    "SIGN": torch.sign,
    "ROUND": torch.round,
    "ISINF": torch.isinf,
    "ISNAN": torch.isnan,
}


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (0.044715 * x**3 + x)))


#: Formulas of `ActivationType` over x, alpha and beta, from its documentation.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "RELU": lambda x, alpha, beta: torch.relu(x),
    "SIGMOID": lambda x, alpha, beta: torch.sigmoid(x),
    "TANH": lambda x, alpha, beta: torch.tanh(x),
    "LEAKY_RELU": lambda x, alpha, beta: torch.where(x >= 0, x, alpha * x),
    "ELU": lambda x, alpha, beta: torch.where(x >= 0, x, alpha * torch.expm1(x)),
    "SELU": lambda x, alpha, beta: beta * torch.where(x > 0, x, alpha * torch.expm1(x)),
    "SOFTSIGN": lambda x, alpha, beta: x / (1 + x.abs()),
    "SOFTPLUS": lambda x, alpha, beta: alpha * torch.log1p(torch.exp(beta * x)),
    "CLIP": lambda x, alpha, beta: x.clamp(max=beta).clamp(min=alpha),
    "HARD_SIGMOID": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "SCALED_TANH": lambda x, alpha, beta: alpha * torch.tanh(beta * x),
    "THRESHOLDED_RELU": lambda x, alpha, beta: torch.where(x > alpha, x, 0),
    "GELU_ERF": lambda x, alpha, beta: 0.5 * x * (1 + torch.erf(math.sqrt(0.5) * x)),
    "GELU_TANH": lambda x, alpha, beta: _gelu_tanh(x),
}


@layer_kind("ELEMENTWISE", "IElementWiseLayer", honours=("op",), inputs=(2, 2), same_dtype=(0, 1))
def elementwise(layer: NetworkLayer) -> Compute:
    """Evaluate ELEMENTWISE: both inputs have one rank and broadcast over sizes of 1."""
    operation = layer.choose("op", _BINARY)
    if len(layer.required(0).shape) != len(layer.required(1).shape):
        raise layer.wrong("has inputs of different ranks")
    return operation


@layer_kind("UNARY", "IUnaryLayer", honours=("op",))
def unary(layer: NetworkLayer) -> Compute:
    """Evaluate UNARY."""
    return layer.choose("op", _UNARY)


@layer_kind("ACTIVATION", "IActivationLayer", honours=("type", "alpha", "beta"))
def activation(layer: NetworkLayer) -> Compute:
    """Evaluate ACTIVATION."""
    formula = layer.choose("type", _ACTIVATIONS)
    alpha, beta = layer["alpha"], layer["beta"]
    return lambda x: formula(widened(x), alpha, beta).to(x.dtype)


@layer_kind("SELECT", "ISelectLayer", inputs=(3, 3), same_dtype=(1, 2))
def select(layer: NetworkLayer) -> Compute:
    """Evaluate SELECT: True selects the first input, False the second."""
    if layer.required(0).dtype != torch.bool:
        raise layer.wrong(f"has a condition of {layer.required(0).dtype}")
    return torch.where


@layer_kind("CONSTANT", "IConstantLayer", honours=("weights", "shape"), inputs=(0, 0))
def constant(layer: NetworkLayer) -> Compute:
    """Evaluate CONSTANT with the network's weights, or the caller's if TensorRT cannot show them (bfloat16)."""
    output, weights = layer.outputs[0], layer["weights"]
    if isinstance(weights, np.ndarray):
        # A copy, because the network only points to memory of its builder.
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
    # torch-tensorrt's map of weights appends the kind of the layer.
    names = [name for name in (layer.name, f"{layer.name} CONSTANT") if name in layer.constants]
    if not names:
        raise layer.wrong(
            f"is of {layer.outputs[0].dtype}, which TensorRT's Python cannot read; pass it in `constants` by name"
        )
    tensor = layer.constants[names[0]]
    # torch-tensorrt 2.13 keeps the tensor, but passes the address of `tensor.contiguous()` to TensorRT.
    if not tensor.is_contiguous():
        raise layer.wrong(
            "was made from a tensor that is not contiguous: TensorRT was given the address of a freed copy"
        )
    if weights.dtype.name == "INT4":
        tensor = unpacked(tensor)
    if weights.dtype.name == "FP4":
        tensor = float4_values(tensor.flatten()).to(torch.float8_e5m2)
    if weights.dtype.name == "FP8" and tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.float8_e4m3fn)
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
    """Evaluate FILL with LINSPACE: alpha plus, along each dimension, the index times that dimension's beta."""
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
    """Evaluate CAST: floats are truncated to integers.

    A value that the integer type cannot hold is an error.
    """
    source, dtype = layer.required(0).dtype, torch_dtype(layer["to_type"])
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


@layer_kind(
    "DEQUANTIZE", "IDequantizeLayer", honours=("axis", "to_type", "block_shape"), inputs=(2, 3), same_dtype=(0, 2)
)
def dequantize(layer: NetworkLayer) -> Compute:
    """Evaluate DEQUANTIZE: integers times their scale, in float32, rounded once.

    A scale is a number, one per index of a dimension, or one per block if it has the rank of the integers.
    """
    dtype = torch_dtype(layer["to_type"])
    spread = _spread(layer)

    def compute(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
        if zero_point is not None and bool(zero_point.any()):
            raise layer.wrong("has zero points other than zero, which TensorRT does not support")
        return (x.float() * spread(scale, x).float()).to(dtype)

    return compute


@layer_kind("QUANTIZE", "IQuantizeLayer", honours=("axis", "to_type", "block_shape"), inputs=(2, 3), same_dtype=(0, 1))
def quantize(layer: NetworkLayer) -> Compute:
    """Evaluate QUANTIZE: values divided by their scale, clamped to the result's range, and rounded half to even."""
    if layer["to_type"] not in ("INT8", "FP8"):
        raise layer.unsupported(f"has to_type {layer['to_type']}")
    dtype = torch_dtype(layer["to_type"])
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    spread = _spread(layer)

    def compute(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None) -> torch.Tensor:
        if zero_point is not None and bool(zero_point.any()):
            raise layer.wrong("has zero points other than zero, which TensorRT does not support")
        scaled = x.float() / spread(scale, x).float()
        rounded = scaled if dtype.is_floating_point else scaled.round()
        return rounded.clamp(limits.min, limits.max).to(dtype)

    return compute


def _spread(layer: NetworkLayer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that repeats scales for the values they belong to."""
    rank, of_scale = len(layer.required(0).shape), layer.required(1).shape
    if math.prod(of_scale) == 1:
        return lambda scale, x: scale.reshape([])
    if len(of_scale) == 1:
        axis = layer["axis"]
        if not 0 <= axis < rank:
            raise layer.wrong(f"has scales along dimension {axis} of {rank}")
        return lambda scale, x: scale.reshape([-1 if dim == axis else 1 for dim in range(rank)])
    if len(of_scale) != rank:
        raise layer.wrong(f"has scales of {len(of_scale)} dimensions for values of {rank}")

    def blocks(scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for dim in range(rank):
            count, rest = divmod(x.shape[dim], scale.shape[dim])
            if rest:
                raise layer.wrong(f"has {scale.shape[dim]} scales for {x.shape[dim]} values of dimension {dim}")
            scale = scale.repeat_interleave(count, dim)
        return scale

    return blocks


@layer_kind("IDENTITY", "IIdentityLayer")
def identity(layer: NetworkLayer) -> Compute:
    """Evaluate IDENTITY."""
    return lambda x: x


@layer_kind("ASSERTION", "IAssertionLayer", honours=("message",))
def assertion(layer: NetworkLayer) -> Compute:
    """Evaluate ASSERTION."""

    def compute(condition: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not bool(condition.all()):
            raise layer.wrong(f"does not hold: {layer['message']}")
        return ()

    return compute
