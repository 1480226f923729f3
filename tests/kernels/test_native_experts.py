"""Experts as native operators: how weights are packed, what the pass rewrites, programs with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from exportable_cache.backends.executorch.native.experts import experts_to_native, pack_experts
from exportable_cache.backends.executorch.options import ExecutorchOptions
from exportable_cache.backends.executorch.target import backend
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.experts import EXPERT_LINEAR, NAME, experts_of, register_experts
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.pipeline.spec import ExportSpec
from exportable_cache.program.spec import ProgramSpec

from ..test_experts import EXPERTS, mixture
from .native_expert_programs import KINDS, weights_of
from .native_linear_programs import packed_of
from .native_programs import EXPERTS as PROGRAM
from .native_programs import MIXTURES


def exported(experts: nn.Module, inputs: int) -> tuple[torch.export.ExportedProgram, tuple[torch.Tensor, ...]]:
    given = (torch.randn(5, inputs), torch.tensor([[0, 3], [2, 0], [1, 3], [2, 3], [3, 2]]), torch.rand(5, 2))
    with torch.no_grad():
        return torch.export.export(experts, given), given


def experts_in(model: Any) -> nn.Module:
    model.set_experts_implementation(register_experts())
    return next(iter(experts_of(model)))[1]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["4bit", "bfloat16", "float16", "float"])
def test_the_operator_is_the_layer_of_experts(family: str, kind: str) -> None:
    model = mixture(family)
    if kind == "4bit":
        model = quantize(model, EXPERTS).model
    elif kind != "float":
        model = model.to(getattr(torch, kind)).float()
    experts = experts_in(model)
    program, given = exported(experts, 64)
    expected = program.module()(*given)
    rewritten = experts_to_native(program)
    targets = [str(node.target) for node in rewritten.graph.nodes]
    assert targets.count(f"exportable_cache.experts_{kind}.default") == 2
    assert not rewritten.graph.find_nodes(op="call_function", target=EXPERT_LINEAR)
    with torch.no_grad():
        torch.testing.assert_close(rewritten.module()(*given), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_give_what_out_is_filled_with(kind: str, has_factors: bool) -> None:
    operator = getattr(torch.ops.exportable_cache, f"experts_{kind}")
    factors = torch.rand(3, 2) if has_factors else None
    given = (torch.randn(3, 64), weights_of(kind, 20, 64), torch.randn(5, 20), torch.randint(5, (3, 2)), factors, 20)
    found = operator(*given)
    assert found.shape == ((3, 20) if has_factors else (3, 2, 20))
    assert torch.equal(operator.out(*given, out=torch.empty_like(found)), found)


def test_each_expert_is_packed_like_a_layer() -> None:
    integers = torch.randint(-8, 8, (3, 20, 64))
    packed = pack_experts(3, lambda expert: packed_of("4bit", integers[expert]))
    for expert in range(3):
        assert torch.equal(packed[expert], packed_of("4bit", integers[expert]))


def test_weights_that_the_program_computes_are_refused() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 32))

        def forward(self, source: torch.Tensor, indices: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
            return EXPERT_LINEAR(source, self.weight * 2, None, None, indices, factors, False)

    with pytest.raises(UnsupportedModelError, match="weights of experts must be parameters.*linears='delegate'"):
        experts_to_native(exported(Doubled(), 32)[0])


@pytest.mark.parametrize(("linears", "experts"), [("native", NAME), ("delegate", "batched_mm")])
def test_experts_are_native_where_linear_layers_are(linears: str, experts: str, monkeypatch) -> None:
    monkeypatch.setattr("exportable_cache.backends.executorch.native.operators.check_native_kernels", lambda: None)
    assert backend.program_spec(ProgramSpec(16), ExecutorchOptions(linears=linears)).experts == experts


@pytest.mark.parametrize(
    ("linears", "quantize", "experts"),
    [("native", "8da4w", "8da4w"), ("delegate", "8da4w", None), ("native", "8da8w", None)],
)
def test_experts_are_quantised_where_a_kernel_takes_them(linears: str, quantize: str, experts: str | None) -> None:
    spec = ExportSpec(
        "model",
        "executorch",
        "x",
        cache=CacheSpec(64),
        options=ExecutorchOptions(linears=linears),
        quantization=Quantization(quantize),
    )
    assert spec.quantization.experts == experts


def test_the_compiled_operators_are_the_plain_ones(native_bundle) -> None:
    native_bundle(PROGRAM)


@pytest.mark.full
def test_programs_of_mixtures_are_the_models(native_bundle) -> None:
    native_bundle(MIXTURES)
