"""ELEMENTWISE, UNARY, ACTIVATION and SELECT: one element in, one out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .dtypes import widened
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """True quotient of floats; that of integers is cut off towards zero."""
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
    """Both inputs have one rank and broadcast over sizes of 1."""
    operation = layer.choose("op", _BINARY)
    if len(layer.inputs[0].shape) != len(layer.inputs[1].shape):
        raise layer.wrong("has inputs of different ranks")
    return operation


@layer_kind("UNARY", "IUnaryLayer", honours=("op",))
def unary(layer: NetworkLayer) -> Compute:
    return layer.choose("op", _UNARY)


@layer_kind("ACTIVATION", "IActivationLayer", honours=("type", "alpha", "beta"))
def activation(layer: NetworkLayer) -> Compute:
    formula = layer.choose("type", _ACTIVATIONS)
    alpha, beta = layer["alpha"], layer["beta"]
    return lambda x: formula(widened(x), alpha, beta).to(x.dtype)


@layer_kind("SELECT", "ISelectLayer", inputs=(3, 3), same_dtype=(1, 2))
def select(layer: NetworkLayer) -> Compute:
    """True takes from the first, False from the second."""
    if layer.inputs[0].dtype != torch.bool:
        raise layer.wrong(f"has a condition of {layer.inputs[0].dtype}")
    return torch.where
