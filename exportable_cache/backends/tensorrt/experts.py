"""Experts of a mixture as batched products over slots: the chosen experts of a few tokens, or all experts once.

A slot is an expert whose weights are multiplied with all tokens. A step has one for each choice, so it reads the chosen
experts only. A prompt with more choices than experts has one for each expert: gathered weights of every choice would
take many times their memory. Products of tokens that did not choose a slot's expert are dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from ...common.compat.transformers import batched_experts, gated, is_split_by_experts, register_experts_implementation
from ...errors import UnsupportedModelError
from ...models.experts import factor_of, floats_of, parts_of, projections, rounds_inputs

#: Name in transformers' `ExpertsInterface`.
NAME = "exportable_cache_slots"


@torch.library.custom_op("exportable_cache::expert_slots", mutates_args=())
def expert_slots(indices: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the experts of all slots: those of each choice, or all if there are more choices than experts.

    Args:
        indices: Chosen experts, int64 [tokens, choices].
        experts: Number of experts.

    Returns:
        int64 [slots].
    """
    every = torch.arange(experts, device=indices.device)
    return indices.flatten().clone() if indices.numel() <= experts else every


@expert_slots.register_fake
def _(indices: torch.Tensor, experts: int) -> torch.Tensor:
    return indices.new_empty(_slots(indices, experts))


@torch.library.custom_op("exportable_cache::slot_factors", mutates_args=())
def slot_factors(indices: torch.Tensor, factors: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the factor of each slot's result for each token, 0 if the token did not choose the slot.

    Args:
        indices: Chosen experts, int64 [tokens, choices], all different for one token.
        factors: Factors of their results [tokens, choices].
        experts: Number of experts.

    Returns:
        [slots, tokens, 1], of the dtype of `factors`.
    """
    is_few = indices.numel() <= experts
    own = torch.arange(indices.numel(), device=indices.device).view_as(indices)
    every = torch.arange(_slots(indices, experts), device=indices.device)
    is_chosen = (own if is_few else indices) == every[:, None, None]
    return torch.where(is_chosen, factors, torch.zeros_like(factors)).sum(-1, keepdim=True)


@slot_factors.register_fake
def _(indices: torch.Tensor, factors: torch.Tensor, experts: int) -> torch.Tensor:
    return factors.new_empty(_slots(indices, experts), indices.shape[0], 1)


def _slots(indices: torch.Tensor, experts: int) -> Any:
    return torch.sym_min(experts, indices.shape[0] * indices.shape[1])


@torch.library.custom_op("exportable_cache::slot_product", mutates_args=())
def slot_product(source: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Multiply the rows of each slot, or all rows with each slot's weight.

    Args:
        source: [slots or 1, tokens, inputs].
        weight: [slots, outputs, inputs].
        transposed: True if the weight is [slots, inputs, outputs].

    Returns:
        [slots, tokens, outputs].
    """
    return source @ (weight if transposed else weight.mT)


@slot_product.register_fake
def _(source: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return source.new_empty(weight.shape[0], source.shape[1], weight.shape[2 if transposed else 1])


@torch.library.custom_op("exportable_cache::chosen_weights", mutates_args=())
def chosen_weights(
    weight: torch.Tensor, scale: torch.Tensor | None, indices: torch.Tensor, factor: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights of some experts.

    Args:
        weight: Floats [experts, ...], or see `floats_of`.
        scale: See `floats_of`; None for floats.
        indices: int64 [slots].
        factor: See `floats_of`.
        dtype: Dtype of the result, which is that of floats, and of scales that are floats.
    """
    chosen = weight[indices]
    if weight.is_floating_point():
        return chosen
    return floats_of(chosen, None if scale is None else scale[indices], factor, dtype)


@chosen_weights.register_fake
def _(
    weight: torch.Tensor, scale: torch.Tensor | None, indices: torch.Tensor, factor: float, dtype: torch.dtype
) -> torch.Tensor:
    sizes = [*weight.shape[1:]]
    if scale is not None and scale.dtype == torch.uint8:
        sizes[-1] *= 2
    return weight.new_empty(indices.shape[0], *sizes, dtype=dtype)


def register_slot_experts() -> str:
    """Register `NAME` with transformers, and return it."""
    register_experts_implementation(NAME, _forward)
    return NAME


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts for hidden states [tokens, hidden], indices and weights [tokens, choices]."""
    if is_split_by_experts(self):
        return batched_experts()(self, hidden_states, top_k_index, top_k_weights)
    up, down = projections(self)
    indices = top_k_index.to(torch.int64)
    experts = len(parts_of(self, up)[0])
    slots = expert_slots(indices, experts)
    factors = slot_factors(indices, top_k_weights, experts)
    states = gated(self, _project(self, up, hidden_states.unsqueeze(0), slots))
    # Not multiplied by 0, because a product of a token that did not choose the expert may have overflowed.
    states = torch.where(factors != 0, states, torch.zeros((), dtype=states.dtype, device=states.device))
    results = _project(self, down, states, slots)
    if getattr(self, "has_post_expert_norm", False):
        results = self.post_expert_norm(results)
    return (results * factors).sum(dim=0).to(hidden_states.dtype)


def _project(module: Any, name: str, source: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the linear layer `name` of each slot's expert [slots, tokens, outputs]."""
    weight, scale, bias, transposed = parts_of(module, name)
    if scale is not None and rounds_inputs(module):
        raise UnsupportedModelError(
            f"experts of {type(module).__name__} must not round their inputs to 8 bits for target tensorrt; use "
            "quantize='4w' or '8w'"
        )
    dtype = weight.dtype if weight.is_floating_point() else source.dtype
    results = slot_product(source, chosen_weights(weight, scale, slots, factor_of(module, name), dtype), transposed)
    return results if bias is None else results + chosen_weights(bias, None, slots, 1.0, bias.dtype).unsqueeze(1)
