"""Experts of TensorRT programs: results by slots are the model's, and no prompt reads more weights than there are."""

from __future__ import annotations

import pytest
import torch

from exportable_cache.backends.tensorrt.experts import expert_slots, register_slot_experts, slot_factors
from exportable_cache.cache.attention.implementation import set_experts
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.experts import experts_of, set_quantized

from .models import engine_model
from .programs import program_of

EXPERTS, CHOICES = 4, 2


def chosen(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, and factors of which one is 0."""
    indices = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).topk(CHOICES).indices
    factors = torch.linspace(0, 1, tokens * CHOICES).view(tokens, CHOICES)
    return indices, factors


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_slots_give_the_models_results(family: str, tokens: int) -> None:
    """Two tokens have as many choices as there are experts; GPT-OSS has biases and transposed weights."""
    model = engine_model(family, **({"num_local_experts": EXPERTS} if family == "gpt_oss" else {}))
    experts = dict(experts_of(model)).popitem()[1]
    indices, factors = chosen(tokens)
    source = torch.randn(tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    results = {}
    for implementation in ("eager", register_slot_experts()):
        set_experts(model, implementation)
        results[implementation] = experts(source, indices, factors)
    set_experts(model, "eager")
    torch.testing.assert_close(*results.values(), rtol=1e-5, atol=1e-5)
    assert len(expert_slots(indices, EXPERTS)) == min(EXPERTS, tokens * CHOICES)


def test_a_token_is_not_changed_by_experts_that_others_chose() -> None:
    """Their products may overflow, and infinity times 0 is not a number."""
    model = engine_model("mixtral")
    experts = dict(experts_of(model)).popitem()[1]
    set_experts(model, register_slot_experts())
    try:
        source = torch.randn(3, model.config.hidden_size)
        indices, factors = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.full((3, 2), 0.5)
        before = experts(source, indices, factors)
        with torch.no_grad():
            saved = experts.gate_up_proj[0].clone()
            experts.gate_up_proj[0] = 1e38
            after = experts(source, indices, factors)
            experts.gate_up_proj[0] = saved
    finally:
        set_experts(model, "eager")
    assert not after[0].isfinite().all()
    assert torch.equal(after[1:], before[1:])


def test_each_choice_has_one_slot() -> None:
    """Two tokens that chose one expert have a slot each while slots are choices, and share it when they are experts."""
    few = slot_factors(torch.tensor([[2, 0], [2, 1]]), torch.tensor([[0.5, 0.25], [0.125, 1.0]]), EXPERTS)
    assert few.squeeze(2).tolist() == [[0.5, 0.0], [0.25, 0.0], [0.0, 0.125], [0.0, 1.0]]
    more = slot_factors(torch.tensor([[2, 0], [2, 1], [3, 2]]), torch.tensor([[0.5, 0.25]] * 3), EXPERTS)
    assert more.squeeze(2).tolist() == [[0.25, 0.0, 0.0], [0.0, 0.25, 0.0], [0.5, 0.5, 0.25], [0.0, 0.0, 0.5]]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_prompt_computes_the_last_layers_experts_for_the_last_token(family: str) -> None:
    program = program_of(engine_model(family)).export("prefill")
    calls = program.graph.find_nodes(op="call_function", target=torch.ops.exportable_cache.slot_product.default)
    sizes = [tuple(call.meta["val"].shape[:2]) for call in calls]
    choices = engine_model(family).config.num_experts_per_tok
    assert all(isinstance(size, torch.SymInt) for shape in sizes[:2] for size in shape)
    assert sizes[2:] == [(choices, 1)] * 2


def test_experts_that_round_their_inputs_are_refused() -> None:
    model = engine_model("mixtral", num_hidden_layers=1)
    experts = dict(experts_of(model)).popitem()[1]
    weight = experts.gate_up_proj
    set_quantized(experts, "gate_up_proj", weight.round().to(torch.int8), weight.new_ones(*weight.shape[:2], 1))
    set_experts(model, register_slot_experts())
    with pytest.raises(UnsupportedModelError, match="MixtralExperts must not round .* use quantize='4w' or '8w'"):
        experts(torch.randn(1, model.config.hidden_size), *chosen(1))
