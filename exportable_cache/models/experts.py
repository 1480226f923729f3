"""Experts of a mixture as two linear layers each, which read only the weights of the experts that were chosen.

transformers stores the experts of most architectures in tensors [experts, ...] and computes them by one function of its
`ExpertsInterface`. `NAME` is another such function. It calls the operator `exportable_cache::expert_linear` for each of
the two layers, and the model's own code for the gate between them. A target with a kernel replaces the operator
(`backends/executorch/native/experts.py`).

Quantised experts are integers or the bits of floats [experts, outputs, inputs], and scales [experts, outputs, groups]
in a parameter whose name adds `_scale`. `NAME` computes them, and a target's function may, such as
`backends/tensorrt/experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..cache.attention.implementation import set_experts
from .rounding import FLOAT8, dequantized_float4, rounded_activations

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name in transformers' `ExpertsInterface`.
NAME = "exportable_cache"
_SCALE = "_scale"
_FACTOR = "_factor"
_BIAS = "_bias"
#: Name of a function that computes quantised experts as `NAME` does, and float ones as batched products.
QUANTIZED_NAME = f"{NAME}_quantized"
#: Attribute of a module of quantised experts: True if the operator rounds activations to 8 bits.
_ROUNDS = "rounds_expert_activations"
_DOWN = "down_proj"
#: Attributes that transformers gives to modules whose experts are computed by its interface.
_DESCRIBED = ("has_gate", "has_bias", "is_transposed")
#: Dimensions of a weight of experts.
_DIMENSIONS = 3
_SCHEMA = (
    "expert_linear(Tensor source, Tensor weight, Tensor? scale, Tensor? bias, Tensor indices, Tensor? factors, "
    "bool transposed, bool rounds=True, float factor=1.0) -> Tensor"
)
_library = torch.library.Library("exportable_cache", "FRAGMENT")


def expert_linear(
    source: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    factors: torch.Tensor | None,
    transposed: bool,
    rounds: bool = True,
    factor: float = 1.0,
) -> torch.Tensor:
    """Compute a linear layer of the experts that were chosen for each token.

    Args:
        source: Activations [tokens, inputs] for all choices of a token, or [tokens, choices, inputs]. They are float32,
            or of any float dtype if the weights are integers and activations are not rounded.
        weight: Weights [experts, outputs, inputs] in the dtype of the activations, or see `floats_of`.
        scale: See `floats_of`; None for float weights.
        bias: Biases [experts, outputs], or None.
        indices: int64 [tokens, choices].
        factors: Factors [tokens, choices], or None.
        transposed: True if the weight is [experts, inputs, outputs].
        rounds: True to round activations to 8 bits per row if the weights are integers, which then have 4 bits.
        factor: See `floats_of`.

    Returns:
        Results [tokens, choices, outputs] in the dtype of the activations; with factors the sum of a token's results
        times its factors, [tokens, outputs].
    """
    if scale is not None and rounds:
        source = rounded_activations(source)

    def layer(expert: int, rows: torch.Tensor) -> torch.Tensor:
        of_expert = weight[expert].T if transposed else weight[expert]
        if not weight.is_floating_point():
            of_expert = floats_of(of_expert, None if scale is None else scale[expert], factor, rows.dtype)
        return nn.functional.linear(rows, of_expert, None if bias is None else bias[expert])

    return by_expert(source, indices, factors, weight.shape[2 if transposed else 1], layer)


def by_expert(
    source: torch.Tensor,
    indices: torch.Tensor,
    factors: torch.Tensor | None,
    outputs: int,
    layer: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the chosen experts one after the other, each for all rows that chose it.

    Args:
        source: See `expert_linear`, also for `indices`, `factors` and the result.
        indices: int64 [tokens, choices].
        factors: Factors [tokens, choices], or None.
        outputs: Number of results of an expert.
        layer: Returns [rows, outputs], given the index of an expert and its rows [rows, inputs].
    """
    rows = source[:, None].expand(*indices.shape, -1) if source.dim() == 2 else source
    results = source.new_empty(*indices.shape, outputs)
    for expert in indices.unique().tolist():
        chosen = indices == expert
        results[chosen] = layer(expert, rows[chosen])
    return results if factors is None else (results * factors[..., None]).sum(dim=1).to(source.dtype)


def experts_output(
    source: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    indices: torch.Tensor,
    factors: torch.Tensor | None,
    transposed: bool,
    rounds: bool = True,
    factor: float = 1.0,
) -> torch.Tensor:
    """Return an uninitialised result of `expert_linear`."""
    rows = indices.shape if factors is None else indices.shape[:1]
    return source.new_empty(*rows, weight.shape[2 if transposed else 1])


_library.define(_SCHEMA)
_library.impl("expert_linear", expert_linear, "CompositeExplicitAutograd")
torch.library.register_fake("exportable_cache::expert_linear", experts_output, lib=_library)
EXPERT_LINEAR = torch.ops.exportable_cache.expert_linear.default


def register_experts() -> str:
    """Register `NAME` with transformers, and return it."""
    from ..common.compat.transformers import register_experts_implementation

    register_experts_implementation(NAME, _forward)
    return NAME


def register_quantized_experts() -> str:
    """Register `QUANTIZED_NAME` with transformers, and return it."""
    from ..common.compat.transformers import register_experts_implementation

    register_experts_implementation(QUANTIZED_NAME, _forward_quantized)
    return QUANTIZED_NAME


def _forward_quantized(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts, see `_forward`."""
    from ..common.compat.transformers import batched_experts

    is_integer = not getattr(self, _DOWN).is_floating_point()
    return (_forward if is_integer else batched_experts())(self, hidden_states, top_k_index, top_k_weights)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts for hidden states [tokens, hidden], indices and weights [tokens, choices]."""
    from ..common.compat.transformers import batched_experts, gated, is_split_by_experts

    # Kernels of the operator compute in float32, unless a target converts integers before the product.
    takes_dtype = hidden_states.dtype == torch.float32 or not rounds_inputs(self)
    if not takes_dtype or is_split_by_experts(self):
        return batched_experts()(self, hidden_states, top_k_index, top_k_weights)
    up, down = projections(self)
    indices = top_k_index.to(torch.int64)
    factors = top_k_weights.to(torch.float32) if rounds_inputs(self) else top_k_weights
    states = gated(self, _project(self, up, hidden_states, indices, None))
    if not getattr(self, "has_post_expert_norm", False):
        return _project(self, down, states, indices, factors)
    results = self.post_expert_norm(_project(self, down, states, indices, None))
    return (results * factors[..., None]).sum(dim=1).to(hidden_states.dtype)


def _project(
    module: Any, name: str, source: torch.Tensor, indices: torch.Tensor, factors: torch.Tensor | None
) -> torch.Tensor:
    weight, scale, bias, transposed = parts_of(module, name)
    further = rounds_inputs(module), factor_of(module, name)
    return EXPERT_LINEAR(source, weight, scale, bias, indices, factors, transposed, *further)


def parts_of(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, bool]:
    """Return a weight of experts with its scales and biases, and True if it is [experts, inputs, outputs]."""
    weight, scale = getattr(module, name), getattr(module, name + _SCALE, None)
    bias = getattr(module, name + _BIAS) if module.has_bias else None
    return weight, scale, bias, module.is_transposed and weight.is_floating_point()


def factor_of(module: Any, name: str) -> float:
    """Return the factor of a weight of experts, see `floats_of`."""
    return getattr(module, name + _FACTOR, 1.0)


def floats_of(weight: torch.Tensor, scale: torch.Tensor | None, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return quantised weights of experts as floats.

    Args:
        weight: int8, or float8 values as uint8 [..., outputs, inputs]; or pairs of 4-bit floats, uint8 [..., outputs,
            inputs / 2].
        scale: Scales of integers, [..., outputs, groups]; of 4-bit floats float8 values as uint8; None for float8.
        factor: Factor of float8 values, or of the scales of 4-bit floats; 1 for integers.
        dtype: Dtype of the result.
    """
    if scale is None:
        return (weight.view(FLOAT8).float() * factor).to(dtype)
    if scale.dtype == torch.uint8:
        return dequantized_float4(weight, scale, factor, dtype)
    return (weight.unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2).to(dtype)


def projections(module: Any) -> tuple[str, str]:
    """Return the names of the parameters that hold the weights of a module of experts."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), _DOWN


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of all experts that `NAME` can compute."""
    for path, module in model.named_modules():
        described: Any = module
        if all(hasattr(module, name) for name in _DESCRIBED):
            weights = [getattr(described, name, None) for name in projections(described)]
            if all(isinstance(one, nn.Parameter) and one.dim() == _DIMENSIONS for one in weights):
                yield path, module


def rows_of_weight(module: Any, name: str) -> torch.Tensor:
    """Return a float weight of experts as [experts, outputs, inputs]."""
    weight: torch.Tensor = getattr(module, name)
    return weight.transpose(1, 2) if module.is_transposed else weight


def set_quantized(
    module: nn.Module,
    name: str,
    integers: torch.Tensor,
    scales: torch.Tensor | None,
    rounds: bool = True,
    factor: float = 1.0,
) -> None:
    """Replace a weight of experts by integers, or the bits of floats, and their scales.

    Args:
        module: Module of the experts.
        name: Name of the weight.
        integers: See `floats_of`, also for scales and factor.
        scales: Scales [experts, outputs, groups], or None.
        rounds: See `expert_linear`; the same for both weights of a module.
        factor: Factor of the values or of their scales.
    """
    setattr(module, name, nn.Parameter(integers, requires_grad=False))
    setattr(module, name + _FACTOR, factor)
    setattr(module, name + _SCALE, None if scales is None else nn.Parameter(scales, requires_grad=False))
    setattr(module, _ROUNDS, rounds)


def rounds_inputs(module: nn.Module) -> bool:
    """Return True if quantised experts are multiplied by activations in 8 bits."""
    return getattr(module, _ROUNDS, True)


def is_expert_scale(module: nn.Module, name: str) -> bool:
    """Return True if a parameter holds the scales of quantised experts."""
    weight = getattr(module, name.removesuffix(_SCALE), None) if name.endswith(_SCALE) else None
    return isinstance(weight, torch.Tensor) and not weight.is_floating_point()


def use_expert_linears(model: PreTrainedModel) -> None:
    """Make a model compute its experts by `NAME`, permanently."""
    set_experts(model, register_experts())
