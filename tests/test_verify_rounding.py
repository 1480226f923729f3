"""Verification of programs that round activations and keys: errors are refused, and other roundings are not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.models.loading.loading import load_to_quantise
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.verify import verify_session

CAPACITY = 128
#: Weights and cache of a program. The first rounds what the others round, so a fault in the limits of one of them may
#: stay within that of the other.
KINDS = [pytest.param("8da4w", "int8", marks=pytest.mark.full), ("8da4w", None), (None, "int8")]


@pytest.fixture(scope="module")
def models() -> dict[str | None, Any]:
    """The demo model, which is trained, with float and with quantised weights."""
    pytest.importorskip("torchao", reason="the executorch extra is not installed")
    model = load_to_quantise("demo").model
    return {None: model, "8da4w": quantize(model, Quantization("8da4w", None, "8w").for_native_linears()).model}


def verified(model: Any, program: Any, kv_dtype: str | None, narrower: int = 0) -> VerifyReport:
    """Verify a session of `program` against `model`, with fewer slots in its rings if that is asked for."""
    cache = ExportableCache.from_model(model, CAPACITY, kv_dtype=kv_dtype)
    session = Session.from_model(program, cache, buckets=False)
    if narrower:
        config = copy.deepcopy(model.config)
        config.sliding_window -= narrower
        session.runner = ModuleRunner(program, ExportableCache.from_config(config, CAPACITY, kv_dtype=kv_dtype))
    return verify_session(session, model, prompts=[20, 60], decode_steps=12)


def attention(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn


def other_last_bits(model: Any) -> None:
    """Change the inputs of linear layers as much as products in another order do."""
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * (1 + 1e-5 * torch.randn(inputs[0].shape, generator=generator)),)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(change)


def larger_keys(model: Any) -> None:
    """Multiply the keys of a layer by 1.1."""
    attention(model, 2).k_norm.register_forward_hook(lambda module, inputs, output: 1.1 * output)


def swapped_heads(model: Any) -> None:
    """Swap two heads of the last layer, after which no keys follow."""
    of = attention(model, 3)

    def swap(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        heads = inputs[0].unflatten(-1, (-1, of.head_dim))
        return (heads[..., [1, 0, 2, 3], :].flatten(-2),)

    of.o_proj.register_forward_pre_hook(swap)


def other_base(model: Any) -> None:
    """Rotate by other frequencies, as with a base that is 10 % larger."""
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.mul_(1.1 ** (-torch.arange(len(frequencies)) / len(frequencies)))


def changed(model: Any, change: Callable[[Any], None]) -> Any:
    program = copy.deepcopy(model)
    other_last_bits(program)
    change(program)
    return program


@pytest.mark.parametrize(("weights", "kv_dtype"), KINDS)
def test_a_right_program_passes(models: dict[str | None, Any], weights: str | None, kv_dtype: str | None) -> None:
    model = models[weights]
    report = verified(model, changed(model, lambda _: None), kv_dtype)
    assert report.passed, str(report)
    assert report.rounding.layers == 4 and report.tolerance < report.spread
    assert VerifyReport(**json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize("fault", [larger_keys, swapped_heads, other_base])
@pytest.mark.parametrize(("weights", "kv_dtype"), KINDS)
def test_errors_are_refused(
    models: dict[str | None, Any], weights: str | None, kv_dtype: str | None, fault: Callable[[Any], None]
) -> None:
    model = models[weights]
    report = verified(model, changed(model, fault), kv_dtype)
    assert not report.passed, str(report)
    assert "exceeds" in str(report)


@pytest.mark.parametrize(("weights", "kv_dtype"), KINDS)
def test_a_window_that_is_off_by_one_is_refused(
    models: dict[str | None, Any], weights: str | None, kv_dtype: str | None
) -> None:
    model = models[weights]
    assert not verified(model, changed(model, lambda _: None), kv_dtype, narrower=1).passed
