"""Rotary embeddings in real numbers: the models' logits, no complex number traced, and upstream still has them."""

import sys

import pytest
import torch
from torch.export import ExportedProgram

from exportable_cache import ExportableCache
from exportable_cache.models.patches.registry import patch_model
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.kinds import kind_model
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits
from ..support.sessions import lowered_session
from ..zoo.architectures import architectures
from ..zoo.build import tiny_model as zoo_model

MODELS = {
    "Llama4TextRotaryEmbedding": lambda: kind_model("llama4_text"),
    "DeepseekV2RotaryEmbedding": lambda: zoo_model(
        next(row for row in architectures() if row.model_type == "deepseek_v2")
    ),
}


def complex_values(program: ExportedProgram) -> list[str]:
    values = ((node.name, node.meta.get("val")) for node in program.graph.nodes)
    return [name for name, value in values if isinstance(value, torch.Tensor) and value.is_complex()]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_traced_program_has_no_complex_numbers_and_the_models_logits(
    name: str,
) -> None:
    model, ids = MODELS[name](), tokens(12)
    program = Program(model, ExportableCache.from_model(model, 32, attn_implementation=None), ProgramSpec(16))
    assert patch_model(model) == sorted([name, "apply_rotary_emb"])
    exported = program.export("prefill")
    assert not complex_values(exported)
    logits = exported.module()(ids, torch.tensor([0]))
    assert (logits - model(ids).logits[:, -1]).abs().max() <= 1e-4


@pytest.mark.canary
@pytest.mark.parametrize("name", MODELS)
def test_upstream_still_rotates_in_complex_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once it does not: then the family's entry in PATCHES can go."""
    model = MODELS[name]()
    program = Program(model, ExportableCache.from_model(model, 32, attn_implementation=None), ProgramSpec(16))
    patch_model(model)
    (kind,) = {type(module) for module in model.modules() if type(module).__name__ == name}
    file = sys.modules[kind.__module__]
    monkeypatch.setattr(kind, "forward", kind.forward._exportable_cache_original)
    monkeypatch.setattr(file, "apply_rotary_emb", file.apply_rotary_emb._exportable_cache_original)
    assert complex_values(program.export("decode"))


def test_other_models_are_left_alone() -> None:
    assert patch_model(tiny_model("llama")) == []


@pytest.mark.full
def test_llama_4_on_executorch() -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    model, ids = kind_model("llama4_text"), tokens(60)
    session = lowered_session(model, "executorch")
    for prompt in (3, 21):
        session.reset()
        assert (
            difference(lambda piece: session.prefill(piece), reference_logits(model, ids, prompt), ids, prompt) <= 1e-4
        )
