"""Quantised models in eager mode, a few rows of a weight at a time.

torchao makes a whole weight float32 in every call: a table of 150,000 rows takes 600 MB for three tokens, and each pass
over a weight leaves the processor's cache. Rows do not depend on one another, so results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Weights made float32 at once: large enough for a product to be one, small enough for a processor's cache.
_ELEMENTS_AT_ONCE = 1 << 20


class QuantizedRows(TorchFunctionMode):
    """A block in which linear layers and embedding tables whose weights torchao has quantised are worked out so."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and is_quantized(args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            parts = [functional.linear(args[0], part) for part in _parts(args[1])]
            output = torch.cat(parts, dim=-1)
            return output if bias is None else output + bias
        if func is functional.embedding and is_quantized(args[1]):
            ids = args[0]
            return rows_of(args[1], ids.flatten()).dequantize().view(*ids.shape, -1)
        return func(*args, **kwargs)


def is_quantized(weight: Any) -> bool:
    """Whether a weight is one of torchao's, of integers and their scales."""
    return hasattr(weight, "qdata") and hasattr(weight, "zero_point")


def rows_of(weight: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
    """Some rows of a quantised weight, quantised."""
    parts = (getattr(weight, name)[index] for name in ("qdata", "scale", "zero_point"))
    return type(weight)(*parts, weight.target_dtype, weight.block_size, weight.dtype, weight.activation_quantization)


def _parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield rows_of(weight, slice(start, start + rows))
