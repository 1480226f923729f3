"""Experts of mixtures as one operator for each of their layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from exportable_cache import ExportableCache
from exportable_cache.errors import InputError
from exportable_cache.models.experts import (
    EXPERT_LINEAR,
    NAME,
    experts_of,
    projections,
    register_experts,
    rows_of_weight,
)
from exportable_cache.models.patches.mechanisms.experts import mix_experts
from exportable_cache.models.quantization.quantize import check_quantizable, quantize
from exportable_cache.models.quantization.sizes import coverage_of, exact_bytes, quantized_bytes
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.models.quantized_rows import QuantizedRows, QuantizedZeros
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from .support.kinds import KINDS, kind_model
from .support.models import tiny_model, tokens

EXPERTS = Quantization("8da4w", 32, None, "signed_mse", "8da4w")
_MIXTURE = {"hidden_size": 64, "num_experts_per_tok": 2}
#: Architectures by what is particular about their experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_MIXTURE, "intermediate_size": 96, "num_local_experts": 4},
    "qwen3_moe": {**_MIXTURE, "moe_intermediate_size": 32, "num_experts": 6},
    # Biases, gates between the others, transposed weights.
    "gpt_oss": {**_MIXTURE, "intermediate_size": 64, "num_local_experts": 4},
    # Shared experts next to them.
    "deepseek_v3": {},
    # No gates.
    "nemotron_h": {
        **KINDS["nemotron_h"][0],
        **{"num_hidden_layers": 2, "layers_block_type": ["attention", "moe"], "n_routed_experts": 4},
        **{"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    },
}


def mixture(family: str) -> Any:
    return tiny_model(family, **FAMILIES[family]) if FAMILIES[family] else kind_model(family)


def logits_of(model: Any, ids: torch.Tensor, experts: str) -> torch.Tensor:
    register_experts()
    model.set_experts_implementation(experts)
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operator_computes_what_transformers_does(family: str) -> None:
    model, ids = mixture(family), tokens(9, 2)
    found = list(experts_of(model))
    assert found and all(path.endswith("experts") for path, _ in found)
    expected = logits_of(model, ids, "batched_mm")
    torch.testing.assert_close(logits_of(model, ids, NAME), expected, atol=1e-5, rtol=1e-5)
    # A fault in the weights of experts shows.
    getattr(found[0][1], projections(found[0][1])[1]).data.mul_(1.5)
    assert (logits_of(model, ids, NAME) - expected).abs().max() > 1e-3


def test_half_precision_is_left_to_transformers() -> None:
    model, ids = mixture("mixtral").bfloat16(), tokens(5)
    assert torch.equal(logits_of(model, ids, NAME), logits_of(model, ids, "batched_mm"))


def test_a_layer_that_was_not_chosen_is_not_read() -> None:
    weight, source = torch.full((4, 8, 32), torch.nan), torch.randn(3, 32)
    weight[1] = torch.randn(8, 32)
    ones, factors = torch.ones(3, 2, dtype=torch.int64), torch.randn(3, 2)
    found = EXPERT_LINEAR(source, weight, None, None, ones, factors, False)
    torch.testing.assert_close(found, (source @ weight[1].T) * factors.sum(1, keepdim=True))


def rounded(source: torch.Tensor) -> torch.Tensor:
    """Rows in 8 bits, from the minimum to the maximum, and back."""
    lowest, highest = source.amin(-1, keepdim=True).clamp(max=0), source.amax(-1, keepdim=True).clamp(min=0)
    scale = (highest - lowest) / 255
    zero = (-128 - (lowest / scale).round()).clamp(-128, 127)
    return (((source / scale).round() + zero).clamp(-128, 127) - zero) * scale


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_quantised_experts_are_their_integers_times_scales(family: str) -> None:
    model = mixture(family)
    quantized = quantize(model, EXPERTS).model
    (_, original), *_ = experts_of(model)
    (_, experts), *_ = experts_of(quantized)
    weights = {}
    for name in projections(experts):
        integers, scales = getattr(experts, name), getattr(experts, f"{name}_scale")
        assert integers.dtype == torch.int8 and scales.dtype == torch.bfloat16
        assert integers.min() == -8 and integers.max() <= 7 and (scales < 0).any()
        weights[name] = (integers.unflatten(2, (scales.shape[2], -1)) * scales.float()[..., None]).flatten(2)
        before = getattr(original, name)
        before = before.transpose(1, 2) if original.is_transposed else before
        assert (weights[name] - before).square().sum() < 0.01 * before.square().sum()
    states, indices = torch.randn(3, 64), torch.tensor([[0, 3], [2, 0], [1, 3]])
    factors = torch.rand(3, 2)
    expected = torch.zeros(3, 64)
    up, down = projections(experts)
    for token in range(3):
        for choice, expert in enumerate(indices[token].tolist()):
            bias = [getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None for name in (up, down)]
            inner = functional.linear(rounded(states[token : token + 1]), weights[up][expert], bias[0])
            inner = functional.linear(rounded(experts._apply_gate(inner)), weights[down][expert], bias[1])
            expected[token] += inner[0] * factors[token, choice]
    with torch.no_grad():
        torch.testing.assert_close(experts(states, indices, factors), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "scheme"), [("mixtral", "4w"), ("gpt_oss", "8w")])
def test_weights_alone_are_quantised_like_linear_layers(family: str, scheme: str) -> None:
    model, spec = mixture(family), Quantization(scheme).for_target("affine", ("4w", "8w"))
    (_, original), *_ = experts_of(model)
    quantized = quantize(model, spec, dtype=torch.bfloat16)
    (_, experts), *_ = experts_of(quantized.model)
    up, down = projections(experts)
    for name in (up, down):
        rows = rows_of_weight(original, name)[2]
        layer = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False)
        layer.weight.data = rows.contiguous()
        holder = tiny_model("llama", hidden_size=64, intermediate_size=64)
        holder.model.layers[0].mlp.down_proj = layer
        same = quantize(holder, Quantization(scheme), dtype=torch.bfloat16).model.model.layers[0].mlp.down_proj.weight
        scales = getattr(experts, f"{name}_scale")[2].float()[..., None]
        integers = getattr(experts, name)[2].float().unflatten(1, (scales.shape[1], -1))
        torch.testing.assert_close((integers * scales).flatten(1).bfloat16(), same.dequantize(), atol=0, rtol=0)
    assert quantized.weights_bytes == quantized_bytes(model, spec, torch.bfloat16)
    grouped = replace(spec, largest_group=32)
    stored = quantize(model, grouped, dtype=torch.bfloat16).weights_bytes
    assert stored == quantized_bytes(model, grouped, torch.bfloat16) > quantized.weights_bytes
    # Activations keep their bits: the layer is that of the converted weights.
    states, chosen, factors = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 3], [2, 0], [1, 3]]), torch.rand(3, 2)
    with torch.no_grad():
        found = experts(states, chosen, factors.bfloat16())
        for name in (up, down):
            scales = getattr(experts, f"{name}_scale").float()[..., None]
            rows = (getattr(experts, name).unflatten(2, (scales.shape[2], -1)) * scales).flatten(2).bfloat16()
            weight = getattr(original, name)
            weight.data = (rows.transpose(1, 2) if original.is_transposed else rows).contiguous()
        model.bfloat16().set_experts_implementation("batched_mm")
        expected = original(states, chosen, factors.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=0.02 * expected.abs().max().item(), rtol=0)


def test_sizes_count_two_integers_a_byte_and_scales() -> None:
    model = mixture("qwen3_moe")
    quantized = quantize(model, EXPERTS)
    assert quantized.weights_bytes == quantized_bytes(model, EXPERTS)
    without = Quantization("8da4w", 32, None, "signed_mse")
    experts = sum(getattr(one, name).numel() for _, one in experts_of(model) for name in projections(one))
    assert quantized_bytes(model, without) - quantized.weights_bytes == experts * 4 - experts // 2 - experts // 32 * 2
    coverage = coverage_of(model, EXPERTS)
    assert not coverage.remark and not any("experts" in name for name, _ in coverage.left)
    assert exact_bytes(model.bfloat16().float()) < 0.52 * exact_bytes(mixture("qwen3_moe"))


def test_a_group_that_does_not_divide_a_row_is_refused_by_name() -> None:
    model = tiny_model("mixtral", hidden_size=64, intermediate_size=48, num_local_experts=4)
    message = r"group_size must divide the rows of .*experts\.down_proj .*, 48 weights long, got 32; use quantize="
    with pytest.raises(InputError, match=message + "'8da8w', which has no groups, and leaves the experts in float"):
        check_quantizable(model, EXPERTS)
    with pytest.raises(InputError, match=message + "'8w', which has no groups$"):
        check_quantizable(model, Quantization("4w", 32, experts="4w"))
    check_quantizable(model, Quantization("8da4w", 32, None, "signed_mse"))
    with pytest.raises(InputError, match="experts must be None"):
        Quantization("8da8w", experts="8da4w")


def test_probes_do_not_compute_quantised_experts() -> None:
    quantized = quantize(mixture("mixtral"), EXPERTS).model
    (_, experts), *_ = experts_of(quantized)
    given = (torch.randn(3, 64), torch.tensor([[0, 3], [2, 0], [1, 3]]), torch.rand(3, 2))
    with torch.no_grad(), QuantizedRows():
        assert experts(*given).any()
    with torch.no_grad(), QuantizedZeros():
        assert not experts(*given).any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_prompt_computes_the_last_layers_experts_for_the_last_token(family: str) -> None:
    model, ids = mixture(family), tokens(7)
    spec = ProgramSpec(16, experts=register_experts())
    program = Program(model, ExportableCache.from_model(model, 64), spec).export("prefill")
    calls = program.graph.find_nodes(op="call_function", target=EXPERT_LINEAR)
    rows = [call.meta["val"].shape[0] for call in calls]
    assert [isinstance(count, int) for count in rows] == [False, False, True, True] and rows[2:] == [1, 1]
    found = program.module()(ids, torch.zeros(1, dtype=torch.int64))
    expected = logits_of(model, ids, "batched_mm")[:, -1]
    torch.testing.assert_close(found.reshape_as(expected), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("device", "expected"), [("meta", [0]), ("cpu", list(range(300)))])
def test_one_expert_shows_the_shape_where_there_are_no_values(device: str, expected: list[int]) -> None:
    """A plan of Step 3.7, which has 288 experts a layer, took minutes."""
    called: list[int] = []

    def expert(index: int, states: torch.Tensor) -> torch.Tensor:
        called.append(index)
        return states

    mixed = mix_experts(torch.ones(3, 4, device=device), torch.ones(3, 300, device=device), 300, expert)
    assert called == expected and mixed.shape == (3, 4)
