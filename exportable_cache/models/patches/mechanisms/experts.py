"""DBRX, LongCat Flash, NLLB-MoE, Step 3.7 and Switch: they loop over the experts that were selected.

The routers of NLLB-MoE and Switch also replace their weights in every call, and NLLB-MoE's reads padding from the last
columns of the attention mask, which are empty slots in a static cache.

Llama 4's experts take every token. On a GPU the tokens of all experts are merged by `reshaped`, because the stride of a
view would be a guard on the length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from ....cache.attention.functions import reshaped
from ....common.patch import Patch
from ..conditions import only_traced
from .host_tensors import off_cpu

if TYPE_CHECKING:
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts, NllbMoeSparseMLP, NllbMoeTop2Router
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersExperts,
        SwitchTransformersTop1Router,
    )


def mix_experts(
    hidden_states: torch.Tensor, weights: torch.Tensor, count: int, expert: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply every expert to every token and return the weighted sum, without shapes that depend on data.

    Args:
        hidden_states: [tokens, hidden].
        weights: [tokens, count], 0 for experts that were not selected.
        count: Number of experts.
        expert: Function `(index, hidden_states) -> [tokens, hidden]`.
    """
    output = torch.zeros_like(hidden_states)
    if hidden_states.device.type == "meta" and not torch.compiler.is_compiling():
        # One shows the shape. Without values, hundreds of experts a layer take minutes (`plan` of Step 3.7).
        count = 1
    for index in range(count):
        output = output + (expert(index, hidden_states) * weights[:, index, None]).to(hidden_states.dtype)
    return output


def _weights_by_expert(top_k_index: torch.Tensor, top_k_weights: torch.Tensor, count: int) -> torch.Tensor:
    """Convert indices and weights [tokens, k] to weights by expert [tokens, count]."""
    return (F.one_hot(top_k_index, count).to(top_k_weights.dtype) * top_k_weights[..., None]).sum(dim=1)


def _dbrx_experts(
    self: DbrxExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    batch_size = hidden_states.shape[0]
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = self.mlp.w1.view(shape), self.mlp.v1.view(shape), self.mlp.w2.view(shape)
    output = mix_experts(
        hidden_states.reshape(-1, self.hidden_size),
        _weights_by_expert(top_k_index, top_k_weights, self.num_experts),
        self.num_experts,
        lambda index, states: self.mlp(states, w1[index], v1[index], w2[index]),
    )
    return output.view(batch_size, -1, self.hidden_size)


def _llama_experts(self: Llama4TextExperts, hidden_states: torch.Tensor, *, original: Callable) -> torch.Tensor:
    hidden_states = hidden_states.view(self.num_experts, -1, self.hidden_size)
    gate, up = torch.bmm(hidden_states, self.gate_up_proj).chunk(2, dim=-1)
    return reshaped(torch.bmm(up * self.act_fn(gate), self.down_proj), -1, self.hidden_size)


def _longcat_experts(
    self: LongcatFlashExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    weights = _weights_by_expert(top_k_index, top_k_weights, self.total_experts)

    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(states, self.gate_up_proj[index]).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])

    output = mix_experts(hidden_states, weights, self.num_routed_experts, expert)
    # Experts after the routed ones are identities.
    return output + hidden_states * weights[:, self.num_routed_experts :].sum(dim=1, keepdim=True).to(
        hidden_states.dtype
    )


def _nllb_experts(
    self: NllbMoeExperts,
    hidden_states: torch.Tensor,
    router_mask: torch.Tensor,
    router_probs: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    # `router_mask` has one column per selection, and 0 where nothing was written, as upstream.
    chosen = F.one_hot(router_mask, self.num_experts).to(router_probs.dtype)
    weights = (chosen * router_probs[..., None]).sum(dim=1)
    keep = 1.0 if self.training else 1.0 - self.moe_token_dropout
    return mix_experts(
        hidden_states, weights * keep, self.num_experts, lambda index, states: self[f"expert_{index}"](states)
    )


def _nllb_block(original: Callable) -> Callable:
    def forward(
        self: NllbMoeSparseMLP, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.training:
            return original(self, hidden_states, padding_mask)
        states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = _routed(self.router, states)
        # Padding is routed too, because it does not affect other tokens.
        if self.router.second_expert_policy == "all" and self.router.moe_eval_capacity_token_fraction >= 1:
            chosen, weights = _two_experts(self.router, logits, states.dtype)
        else:
            chosen, weights = self.router.route_tokens(logits, states.dtype, None)
        return self.experts(states, chosen, weights).reshape(hidden_states.shape)

    return forward


def _two_experts(
    router: NllbMoeTop2Router, logits: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the one-hot first expert and the weights of both, as `route_tokens` with unlimited capacity."""
    weights = logits.softmax(dim=-1).to(dtype)
    first = F.one_hot(weights.argmax(dim=-1), router.num_experts)
    second = F.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(dim=-1), router.num_experts)
    of_first, of_second = router.normalize_router_probabilities(weights, first, second)
    return first, of_first[:, None] * first + of_second[:, None] * second


def _switch_router(
    self: SwitchTransformersTop1Router, hidden_states: torch.Tensor, *, original: Callable
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = _routed(self, hidden_states)
    weights, index = logits.softmax(dim=-1).to(hidden_states.dtype).max(dim=-1, keepdim=True)
    chosen = F.one_hot(index[..., 0], self.num_experts)
    # An expert takes at most `expert_capacity` tokens per call.
    chosen = chosen * (chosen.cumsum(dim=-2) <= self.expert_capacity)
    return chosen, weights, logits


def _routed(router: NllbMoeTop2Router | SwitchTransformersTop1Router, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return router logits [..., experts], in the router's dtype."""
    weight, bias = router.classifier.weight, router.classifier.bias
    return F.linear(
        hidden_states.to(router.dtype), weight.to(router.dtype), None if bias is None else bias.to(router.dtype)
    )


def _switch_experts(
    self: SwitchTransformersExperts,
    hidden_states: torch.Tensor,
    selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    # `selected_experts` is one-hot, [tokens, 1, experts], and zeros for tokens over an expert's capacity.
    weights = selected_experts[:, 0].to(routing_weights.dtype) * routing_weights
    return mix_experts(hidden_states, weights, self.num_experts, lambda index, states: self[f"expert_{index}"](states))


def _step_experts(
    self: Step3p7Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    original: Callable,
) -> torch.Tensor:
    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        return F.linear(self._apply_gate(F.linear(states, self.gate_up_proj[index])), self.down_proj[index])

    return mix_experts(
        hidden_states, _weights_by_expert(top_k_index, top_k_weights, self.num_experts), self.num_experts, expert
    )


_REASON = "it loops over the experts that were selected"
_ROUTER = "its router replaces its weights in every call"


def _of_class(file: str, name: str, replacement: Callable, *digests: str) -> tuple[Patch, ...]:
    return (Patch(file, f"{name}.forward", only_traced(replacement), _REASON, digests, source=name),)


PATCHES = {
    "dbrx": _of_class("dbrx.modeling_dbrx", "DbrxExperts", _dbrx_experts, "b83eeaea83b56183"),
    "llama4_text": (
        Patch(
            "llama4.modeling_llama4",
            "Llama4TextExperts.forward",
            off_cpu(_llama_experts),
            "its graph for a GPU would have a guard on the length of a prompt",
            ("b4e2b7fa42dfbffb",),
            needed=False,
        ),
    ),
    "longcat_flash": _of_class(
        "longcat_flash.modeling_longcat_flash", "LongcatFlashExperts", _longcat_experts, "94aa5350d765972b"
    ),
    "nllb-moe": (
        *_of_class("nllb_moe.modeling_nllb_moe", "NllbMoeExperts", _nllb_experts, "6a3cc213299fb176"),
        Patch(
            "nllb_moe.modeling_nllb_moe",
            "NllbMoeSparseMLP.forward",
            _nllb_block,
            f"{_ROUTER}, and takes empty slots of a static cache for padding",
            ("fd5f1d8f83ca1b99",),
            source="NllbMoeSparseMLP NllbMoeTop2Router",
        ),
    ),
    "step3p5": _of_class("step3p7.modeling_step3p7", "Step3p7Experts", _step_experts, "aa2624bdfc191949"),
    "step3p7": _of_class("step3p7.modeling_step3p7", "Step3p7Experts", _step_experts, "aa2624bdfc191949"),
    "switch_transformers": (
        *_of_class(
            "switch_transformers.modeling_switch_transformers",
            "SwitchTransformersExperts",
            _switch_experts,
            "4a595a85c75d1acc",
        ),
        Patch(
            "switch_transformers.modeling_switch_transformers",
            "SwitchTransformersTop1Router.forward",
            only_traced(_switch_router),
            _ROUTER,
            ("e9855b32b50729f2",),
            source="SwitchTransformersTop1Router",
        ),
    ),
}
