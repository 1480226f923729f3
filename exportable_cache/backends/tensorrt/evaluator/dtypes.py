"""TensorRT's element types in torch."""

from __future__ import annotations

import torch

from ....errors import VerificationError

_TORCH = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a `tensorrt.DataType` by its name.

    Raises:
        VerificationError: If torch has none that computes on a CPU.
    """
    if name not in _TORCH:
        raise VerificationError(
            f"the network has a tensor of type {name}; the reference evaluator knows {', '.join(_TORCH)}"
        )
    return _TORCH[name]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Half-precision values in float32, in which TensorRT accumulates sums and products; others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
