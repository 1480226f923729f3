"""Quantised linear layers traced as the one operator that stands for each of them.

Traced as they are, each of torchao's layers is some ten operators, worked out on symbolic sizes by the tracer, only to
be folded into one then. So a layer of each kind is traced by itself, before the model is, and calls of the operator are
recorded for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...models.quantized_rows import is_quantized
from .quantized_linears import fold_linears, folded_call

#: What a layer's operators may read beside its input.
_PARTS = ("qdata", "scale", "zero_point", "bias")
#: Dimensions of what layers are applied to: [batch, length, features]. Layers over others are folded after the trace.
_DIMENSIONS = 3


class _Kind(NamedTuple):
    """Attributes:
    parts: Which of `_PARTS` the operator takes, in order.
    recipe: Its key.
    """

    parts: tuple[str, ...]
    recipe: str


class FoldedLinears(TorchFunctionMode):
    """A block in which quantised linear layers are traced as `exportable_cache::quantized_linear`: what `fold_linears`
    makes of them otherwise.

    Args:
        model: Its layers are looked at; what cannot be folded is traced as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._kinds: dict[tuple, _Kind | None] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_quantized(weight := module.weight):
                key = _key(weight, module.bias)
                if key not in self._kinds:
                    self._kinds[key] = _traced(weight, module.bias)

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and len(args) > 1 and is_quantized(args[1]):
            source, weight = args[:2]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            kind = self._kinds.get(_key(weight, bias))
            if kind is not None and source.dim() == _DIMENSIONS and source.dtype == torch.float32:
                tensors = [bias if part == "bias" else getattr(weight, part) for part in kind.parts]
                return torch.ops.exportable_cache.quantized_linear(source, tensors, kind.recipe)
        return func(*args, **kwargs)


def _key(weight: Any, bias: torch.Tensor | None) -> tuple:
    """The same for layers of one recipe: it does not depend on the number of outputs."""
    form = (type(weight), weight.target_dtype, tuple(weight.block_size), weight.dtype, weight.activation_quantization)
    parts = (weight.qdata, weight.scale, weight.zero_point)
    return (*form, bias is None, *((part.dtype, tuple(part.shape[1:])) for part in parts))


def _traced(weight: Any, bias: torch.Tensor | None) -> _Kind | None:
    """One output of a layer, traced and folded."""
    with torch.no_grad():
        layer = _Layer(weight, bias)
        source = torch.zeros((2, *[3] * (_DIMENSIONS - 2), weight.shape[1]))
        program = fold_linears(torch.export.export(layer, (source,)))
    call = folded_call(program.graph.output_node().args[0][0])
    if call is None or call.source.name not in program.graph_signature.user_inputs:
        return None
    parameters = program.graph_signature.inputs_to_parameters
    return _Kind(tuple(parameters[part.name] for part in call.weights), call.recipe)


class _Layer(nn.Module):
    """The first output of a quantised linear layer, whose parts are parameters."""

    def __init__(self, weight: Any, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._class = type(weight)
        self._form = (weight.target_dtype, weight.block_size, weight.dtype, weight.activation_quantization)
        for name, part in zip(_PARTS, (weight.qdata, weight.scale, weight.zero_point, bias), strict=True):
            first = None if part is None else nn.Parameter(part[:1].detach().clone(), requires_grad=False)
            self.register_parameter(name, first)

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        weight = self._class(self.qdata, self.scale, self.zero_point, *self._form)
        return functional.linear(source, weight, self.bias)
