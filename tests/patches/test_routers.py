"""NLLB-MoE's and Switch's routers as replaced: what the originals choose, without their cast and their padding.

The experts of Llama 4 as replaced compute what the originals compute.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig, NllbMoeConfig, SwitchTransformersConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from exportable_cache.models.patches.mechanisms.experts import _llama_experts, _nllb_block, _switch_router

TOKENS, HIDDEN = 12, 16


def nllb(**fields: Any) -> NllbMoeSparseMLP:
    torch.manual_seed(0)
    config = NllbMoeConfig(d_model=HIDDEN, num_experts=4, encoder_ffn_dim=8, decoder_ffn_dim=8, **fields)
    return NllbMoeSparseMLP(config, ffn_dim=8).eval()


def switch(**fields: Any) -> SwitchTransformersTop1Router:
    torch.manual_seed(0)
    return SwitchTransformersTop1Router(SwitchTransformersConfig(d_model=HIDDEN, num_experts=4, **fields)).eval()


def own(method: Any) -> Any:
    return getattr(method, "_exportable_cache_original", method)


def states(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_router_prob_before_dropping": True},
        {"router_bias": True},
        {"moe_eval_capacity_token_fraction": 0.2},
    ],
)
@torch.no_grad()
def test_nllb_routes_as_without_padding(fields: dict[str, Any]) -> None:
    block, original = nllb(**fields), own(NllbMoeSparseMLP.forward)
    expected = original(block, states(), None)
    found = _nllb_block(original)(block, states(), torch.zeros(2, 1, TOKENS, TOKENS))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_nllb_in_training_is_as_it_was() -> None:
    block = nllb(moe_token_dropout=0.0).train()
    block.router.second_expert_policy = "all"
    mask = torch.zeros(2, 1, TOKENS, TOKENS).index_fill(3, torch.tensor([3]), -1e9)
    original = own(NllbMoeSparseMLP.forward)
    assert torch.equal(_nllb_block(original)(block, states(), mask), original(block, states(), mask))


@pytest.mark.parametrize("fields", [{}, {"router_bias": True}, {"expert_capacity": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_switch_chooses_as_the_original(fields: dict[str, Any], dtype: torch.dtype) -> None:
    router, given = switch(**fields).to(dtype), states().to(dtype)
    # The replacement goes first: the original leaves the router in another dtype.
    found = _switch_router(router, given, original=None)
    for ours, theirs in zip(found, own(SwitchTransformersTop1Router.forward)(router, given), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.canary
@pytest.mark.parametrize("model_type", ["nllb-moe", "switch_transformers"])
def test_routers_still_replace_their_weights(model_type: str) -> None:
    """Fails once they do not: then they can be traced as they are."""
    router = nllb().router if model_type == "nllb-moe" else switch()
    router.forward = own(type(router).forward).__get__(router)
    given = states(1)[0] if model_type == "nllb-moe" else states(1)
    with pytest.raises(RuntimeError, match="swap"):
        torch.export.export(router, (given,))


@pytest.mark.canary
@torch.no_grad()
def test_nllb_still_takes_empty_slots_for_padding() -> None:
    """Fails once it does not: then its block needs no patch for static caches."""
    block, original = nllb(), own(NllbMoeSparseMLP.forward)
    # Twelve tokens, in the first slots of forty.
    mask = torch.zeros(1, 1, TOKENS, 40).index_fill(3, torch.arange(TOKENS, 40), torch.finfo(torch.float32).min)
    assert not torch.allclose(original(block, states(1), mask), original(block, states(1), None))


@torch.no_grad()
def test_llama_experts_are_those_of_upstream() -> None:
    """Check the replacement for GPUs, which this CPU runs too."""
    torch.manual_seed(0)
    experts = Llama4TextExperts(Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=8, num_local_experts=3))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    original, tokens = own(Llama4TextExperts.forward), torch.randn(3 * TOKENS, HIDDEN)
    assert torch.equal(_llama_experts(experts, tokens, original=original), original(experts, tokens))
