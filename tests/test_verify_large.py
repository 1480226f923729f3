"""Verification of large models: one sequence of which all prompts are beginnings, and the program opened after it."""

from pathlib import Path

import pytest
import torch

from exportable_cache import export
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.verification import compare as comparing
from exportable_cache.verification import references
from exportable_cache.verification.verify import verify

from .support.models import tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")


def test_the_reference_comes_first_and_a_program_of_other_weights_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "MOST_PARAMETERS", 0)
    events = []
    reference, opened = comparing.logits_of_beginnings, Bundle.open_runner

    def logits_of_beginnings(*given):
        events.append("reference")
        return reference(*given)

    def open_runner(bundle):
        events.append("program")
        return opened(bundle)

    monkeypatch.setattr(comparing, "logits_of_beginnings", logits_of_beginnings)
    monkeypatch.setattr(Bundle, "open_runner", open_runner)
    one_ring = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    model = tiny_model("gemma3_text", hidden_size=64, head_dim=16, **one_ring)
    # Past the window of 8, and up to a full cache.
    bundle = export(model, "executorch", 40, tmp_path / "out")
    recorded = bundle.manifest.verification
    assert recorded["at_once"] and recorded["passed"] and recorded["windows"] == [8]
    assert max(prompt["length"] for prompt in recorded["prompts"]) == 40
    assert events == ["reference", "program"]
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[0] += 0.1
    report = verify(bundle, model)
    assert report.at_once and not report.passed
