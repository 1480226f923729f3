"""Eager mode for quantised models that dequantises a few rows of a weight at a time.

torchao dequantises a whole weight to float32 in every call: a table of 150,000 rows takes 600 MB for three tokens, and
each pass over a weight exceeds the processor's cache. Rows are independent, so results are the same. Activations are
rounded once for all layers that read the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .experts import EXPERT_LINEAR, experts_output
from .rounding import FLOAT8_ROUNDED, Float8Linear, FloatLinear, rounded_activations

if TYPE_CHECKING:
    from typing_extensions import Self

    class QuantizedWeight(torch.Tensor):
        """The attributes of torchao's quantised weights, such as `IntxUnpackedToInt8Tensor`, that are used here."""

        qdata: torch.Tensor
        scale: torch.Tensor
        zero_point: torch.Tensor
        target_dtype: torch.dtype
        block_size: tuple[int, ...]
        activation_quantization: Any

        def __new__(
            cls,
            qdata: torch.Tensor,
            scale: torch.Tensor,
            zero_point: torch.Tensor,
            target_dtype: torch.dtype,
            block_size: tuple[int, ...],
            dtype: torch.dtype,
            activation_quantization: Any = None,
        ) -> Self:
            """Create a weight from its parts."""
            ...


# Weights dequantised at once: enough for an efficient product, few enough for the processor's cache.
_ELEMENTS_AT_ONCE = 1 << 20


class OrderedLinear(nn.Linear):
    """A linear layer whose weight has its columns in another order than its inputs, as in GPTQ's act-order.

    Args:
        linear: The layer to replace.
        order: int64 [inputs], the input of each column.
    """

    order: torch.Tensor

    def __init__(self, linear: nn.Linear, order: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("order", order)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs [..., outputs] for inputs [..., inputs]."""
        return functional.linear(input.index_select(-1, self.order), self.weight, self.bias)


class IndexedTables(TorchFunctionMode):
    """A context manager in which rows of torchao's quantised tables can be indexed, as Gemma 4 does for its padding."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ and is_quantized(args[0]):
            first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_row = isinstance(first, int)
            # Empty past the last row, of which there is no first, as in a table of floats.
            rows = rows_of(args[0], slice(first, first + 1 or None) if is_row else first).dequantize()
            index = (0 if is_row else slice(None), *rest)
            return rows[index]
        return func(*args, **(kwargs or {}))


def indexed_tables(model: nn.Module) -> AbstractContextManager[Any]:
    """Return `IndexedTables` for a quantised model, and a context manager that does nothing for others."""
    return IndexedTables() if has_quantized_weights(model) else nullcontext()


class QuantizedRows(IndexedTables):
    """A context manager that computes torchao's quantised linear layers and embeddings a few rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        # The last rounded tensor with its version, because queries, keys and values read the same one.
        self._source: torch.Tensor | None = None
        self._version = -1
        self._rounded: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and is_quantized(args[1]):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            source = self._rounding(args[0]) if rounds_activations(args[1]) else args[0]
            output = torch.cat([functional.linear(source, part.dequantize()) for part in _parts(args[1])], dim=-1)
            return output if bias is None else output + bias
        if func is functional.embedding and is_quantized(args[1]):
            ids = args[0]
            return rows_of(args[1], ids.flatten()).dequantize().view(*ids.shape, -1)
        return super().__torch_function__(func, types, args, kwargs)

    def _rounding(self, source: torch.Tensor) -> torch.Tensor:
        if source is not self._source or source._version != self._version or self._rounded is None:
            self._source, self._version, self._rounded = source, source._version, rounded_activations(source)
        return self._rounded


class ExactActivations(QuantizedRows):
    """A `QuantizedRows` in which quantised layers, also experts and those in float8, do not round their inputs."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is EXPERT_LINEAR:
            # The argument is `rounds`.
            return func(*args[:7], False, *args[8:])
        if func is FLOAT8_ROUNDED:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def _rounding(self, source: torch.Tensor) -> torch.Tensor:
        return source


class QuantizedZeros(QuantizedRows):
    """A `QuantizedRows` whose quantised linear layers return zeros, for callers that need only shapes and masks.

    It exists because dequantising the weights of a large model takes a minute.
    """

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and is_quantized(args[1]):
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if func is EXPERT_LINEAR:
            return experts_output(*args).zero_()
        return super().__torch_function__(func, types, args, kwargs)


def is_quantized(weight: Any) -> TypeGuard[QuantizedWeight]:
    """Return True if a weight is a quantised one of torchao, with integers and scales."""
    return hasattr(weight, "qdata") and hasattr(weight, "zero_point")


def rounds_activations(weight: Any) -> TypeGuard[QuantizedWeight]:
    """Return True if a weight is quantised together with the activations that it is multiplied by."""
    # torchao's 8-bit weights have another attribute for it, and are not made here.
    return is_quantized(weight) and getattr(weight, "activation_quantization", None) is not None


def rows_of(weight: QuantizedWeight, index: torch.Tensor | slice) -> QuantizedWeight:
    """Return some rows of a quantised weight as a quantised weight."""
    form = (weight.target_dtype, weight.block_size, weight.dtype, weight.activation_quantization)
    return type(weight)(weight.qdata[index], weight.scale[index], weight.zero_point[index], *form)


def has_quantized_weights(model: nn.Module) -> bool:
    """Return True if a linear layer or an embedding table of a model is quantised."""
    return any(
        isinstance(module, FloatLinear) or is_quantized(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    )


def rounds_inputs(model: nn.Module) -> bool:
    """Return True if a linear layer of a model rounds the activations that it multiplies."""
    return any(
        isinstance(module, Float8Linear) or (isinstance(module, nn.Linear) and rounds_activations(module.weight))
        for module in model.modules()
    )


def _parts(weight: QuantizedWeight) -> Iterator[QuantizedWeight]:
    rows = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        yield rows_of(weight, slice(start, start + rows))
