"""Patched methods compute what the originals do, and each original still needs its patch."""

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.patches.transformers_methods import METHODS, patch_methods
from exportable_cache.program import Program

from ..zoo.architectures import architectures
from ..zoo.build import STEPS, cached_logits, tiny_model, tokens

#: Model type -> the patched class it shows, and a method whose tracing needs the patch. (NLLB-MoE and Switch are in the zoo.)
SHOWN = {
    "mvp": ("MvpLearnedPositionalEmbedding", "decode"),
    "trocr": ("TrOCRLearnedPositionalEmbedding", "decode"),
    "dbrx": ("DbrxExperts", "decode"),
    "longcat_flash": ("LongcatFlashExperts", "decode"),
    "mpt": ("MptAttention", "prefill"),
}


def model_of(model_type: str):
    return tiny_model(next(row for row in architectures() if row.model_type == model_type))


def program_of(model) -> Program:
    return Program(model, ExportableCache.from_model(model, 64, attn_implementation=None), prefill_length=16)


@pytest.mark.parametrize("model_type", SHOWN)
@torch.no_grad()
def test_the_patched_program_is_the_model(model_type: str) -> None:
    model, ids = model_of(model_type), tokens()
    expected = cached_logits(model, ids, 6)
    program = program_of(model)
    assert SHOWN[model_type][0] in patch_methods(model)
    prefill, decode = (program.export(name).module() for name in ("prefill", "decode"))
    rows = [prefill(ids[:, :6].clone(), torch.tensor([0]))]
    # Both modules write to the same buffers, those of the program that was exported.
    for position in range(6, 6 + STEPS):
        rows.append(decode(ids[:, position : position + 1].clone(), torch.tensor([position])))
    assert (torch.cat(rows) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("model_type", SHOWN)
def test_the_original_still_cannot_be_traced(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once upstream can: then the entry in METHODS can go."""
    name, method = SHOWN[model_type]
    model = model_of(model_type)
    program = program_of(model)
    (kind,) = {type(module) for module in model.modules() if type(module).__name__ == name}
    monkeypatch.setattr(kind, "forward", kind.forward._exportable_cache_original)
    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        program.export(method)


def test_every_patch_is_shown() -> None:
    assert set(METHODS) - {kind for kind, _ in SHOWN.values()} == {"NllbMoeExperts", "SwitchTransformersExperts"}


def test_models_that_compute_attention_themselves_take_our_masks() -> None:
    """Transformers will not switch them: without our name in their config, masks depend on data and tracing fails."""
    model = model_of("megatron-bert")
    assert not model._can_set_attn_implementation()
    program = program_of(model)
    assert "where" in str([node.name for node in program.export("decode").graph.nodes])
    assert model.config._attn_implementation == "eager"
