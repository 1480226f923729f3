"""MATRIX_MULTIPLY and EINSUM: products, accumulated in float32 for half precision and rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .dtypes import widened
from .layer import layer_kind

if TYPE_CHECKING:
    from .layer import Compute, NetworkLayer

_OPERANDS = ("NONE", "TRANSPOSE", "VECTOR")


@layer_kind("MATRIX_MULTIPLY", "IMatrixMultiplyLayer", honours=("op0", "op1"), inputs=(2, 2), same_dtype=(0, 1))
def matrix_multiply(layer: NetworkLayer) -> Compute:
    """The last two dimensions are a matrix, the last one alone a vector; those before them broadcast at equal rank."""
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
    equation = layer["equation"]
    if len({tensor.dtype for tensor in layer.inputs}) > 1:
        raise layer.wrong("multiplies tensors of different dtypes")
    return lambda *tensors: torch.einsum(equation, *map(widened, tensors)).to(tensors[0].dtype)
