"""The patched functions of transformers: what they do with our layers, and that they are still needed."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch.export import Dim
from transformers import DynamicCache

from exportable_cache import ExportableCache
from exportable_cache.models.patches.registry import patch_model

from ..scans.test_scans import delta_inputs, state_space_inputs
from ..support.kinds import kind_model
from ..support.models import tiny_model, tokens

FAMILIES = {
    "mamba_selective_scan": "mamba",
    "mamba2_chunk_scan": "mamba2",
    "torch_chunk_gated_delta_rule": "qwen3_next",
}


def original_of(name: str):
    """The function that the patch replaced, from the modeling file of one of its models."""
    model = kind_model(FAMILIES[name])
    patch_model(model)
    file = sys.modules[type(model).__module__]
    return getattr(file, name)._exportable_cache_original


@pytest.mark.parametrize("name", FAMILIES)
def test_models_are_patched_once(name: str) -> None:
    model = kind_model(FAMILIES[name])
    found = patch_model(model)
    assert name in found
    file = sys.modules[type(model).__module__]
    patched = getattr(file, name)
    assert patch_model(model) == found and getattr(file, name) is patched
    assert not hasattr(patched._exportable_cache_original, "_exportable_cache_original")


def test_other_models_are_left_alone() -> None:
    assert patch_model(tiny_model("llama")) == []


@torch.no_grad()
def test_a_dynamic_cache_gets_what_it_always_got(monkeypatch) -> None:
    model, ids = kind_model("mamba"), tokens(9)

    def run() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], cache_params=cache)
        return model(ids[:, 5:], cache_params=cache).logits

    patch_model(model)
    patched = run()
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, "mamba_selective_scan", file.mamba_selective_scan._exportable_cache_original)
    assert torch.equal(run(), patched)


@pytest.mark.canary
@torch.no_grad()
def test_the_selective_scan_still_starts_from_zeros_upstream(monkeypatch) -> None:
    assert "initial_state" not in inspect.signature(original_of("mamba_selective_scan")).parameters
    model, ids = kind_model("mamba"), tokens(9)
    whole = model(ids).logits[:, -1]
    file = sys.modules[type(model).__module__]

    def in_two_parts() -> torch.Tensor:
        cache = ExportableCache.from_model(model, max_cache_len=16)
        model(ids[:, :5], cache_params=cache)
        return model(ids[:, 5:], cache_params=cache).logits[:, -1]

    assert (in_two_parts() - whole).abs().max() < 1e-5
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], cache_params=cache)
    monkeypatch.setattr(file, "mamba_selective_scan", file.mamba_selective_scan._exportable_cache_original)
    assert (model(ids[:, 5:], cache_params=cache).logits[:, -1] - whole).abs().max() > 1e-4


@pytest.mark.canary
@pytest.mark.parametrize("name", ["mamba2_chunk_scan", "torch_chunk_gated_delta_rule"])
def test_the_chunked_scans_still_fix_the_length_upstream(name: str) -> None:
    original = original_of(name)

    def made(length: int) -> dict[str, torch.Tensor]:
        inputs, state = state_space_inputs(length) if name == "mamba2_chunk_scan" else delta_inputs(length, False)
        if "decay" in inputs:
            inputs["g"] = inputs.pop("decay")
        names = [key for key in inspect.signature(original).parameters if isinstance(inputs.get(key), torch.Tensor)]
        return {key: inputs[key] for key in names if inputs[key].dim() > 1 or key == "A"}

    _, state = state_space_inputs(2) if name == "mamba2_chunk_scan" else delta_inputs(2, False)
    options = {"chunk_size": 8, "initial_states": state, "return_final_states": True}
    if name != "mamba2_chunk_scan":
        options = {"chunk_size": 8, "initial_state": state, "output_final_state": True}

    class Module(torch.nn.Module):
        def forward(self, tensors: dict) -> tuple[torch.Tensor, torch.Tensor]:
            return original(**tensors, **options)

    def serves_every_length() -> bool:
        tensors, length = made(12), Dim("length", min=2, max=40)
        shapes = {key: {1: length} if value.dim() > 2 else None for key, value in tensors.items()}
        try:
            exported = torch.export.export(
                Module(), (tensors,), dynamic_shapes=(shapes,), prefer_deferred_runtime_asserts_over_guards=True
            ).module()
            found = [(exported(made(size)), original(**made(size), **options)) for size in (5, 8, 12, 16, 33)]
        except Exception:  # the tracer's own errors, or a runtime assertion about the length
            return False
        return all(torch.allclose(got[0], expected[0], atol=1e-5) for got, expected in found)

    assert not serves_every_length()
