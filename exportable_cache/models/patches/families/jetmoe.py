"""JetMoE: it sorts tokens by expert, in attention and feed-forward, and splits them by counts that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ..conditions import only_traced
from ..mechanisms.experts import mix_experts


def _routed(router: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route tokens [tokens, hidden]: experts, one-hot [tokens, k, experts], weights [tokens, k], and logits."""
    logits = router.layer(tokens).float()
    best, indices = logits.topk(router.top_k, dim=1)
    gates = torch.softmax(best, dim=1).type_as(tokens)
    return F.one_hot(indices, router.num_experts).to(gates.dtype), gates, logits


def _feed_forward(self: Any, layer_input: torch.Tensor, *, original: Callable) -> torch.Tensor:
    tokens = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, _ = _routed(self.router, tokens)

    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(states, self.input_linear.weight[index]).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.output_linear.weight[index])

    weights = (chosen * gates[..., None]).sum(dim=1)
    output = mix_experts(tokens, weights, self.router.num_experts, expert)
    return output.reshape(layer_input.shape) + self.bias


def _queries(
    self: Any, layer_input: torch.Tensor, *, original: Callable
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the queries of the selected experts, [batch, length, k, hidden], router logits, and the selection."""
    tokens = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, logits = _routed(self.router, tokens)
    output = tokens.new_zeros(*gates.shape, self.hidden_size)
    for index in range(self.num_experts):
        query = F.linear(tokens, self.input_linear.weight[index])
        output = output + chosen[:, :, index, None] * query[:, None]
    return output.reshape(*layer_input.shape[:2], self.top_k, self.hidden_size), logits, (chosen, gates)


def _outputs(
    self: Any,
    layer_input: torch.Tensor,
    topo_info: tuple[torch.Tensor, torch.Tensor],
    *,
    original: Callable,
) -> torch.Tensor:
    """Apply the selected experts to attention outputs [batch, length, k, hidden], and return the weighted sum."""
    chosen, gates = topo_info
    attended = layer_input.reshape(*gates.shape, layer_input.shape[-1])
    weights = chosen * gates[..., None]
    output: Any = 0
    for index in range(self.num_experts):
        of_expert = (attended * weights[:, :, index, None]).sum(dim=1)
        output = output + F.linear(of_expert, self.output_linear.weight[index])
    return output.reshape(*layer_input.shape[:2], self.input_size) + self.bias


def _method(name: str, replacement: Callable, *digests: str) -> Patch:
    reason = "it sorts tokens by expert, and splits them by counts that depend on data"
    source = f"{name} JetMoeTopKGating JetMoeParallelExperts"
    return Patch("jetmoe.modeling_jetmoe", name, only_traced(replacement), reason, digests, source=source)


PATCHES = {
    "jetmoe": (
        _method("JetMoeMoE.forward", _feed_forward, "5a22fc90fd9d5d74"),
        _method("JetMoeMoA.map", _queries, "0cbfc366f3607c51"),
        _method("JetMoeMoA.reduce", _outputs, "2f3851cfc30b1462"),
    )
}
