"""Images and sound: teacher-forced against the whole model, over live sessions and bundles."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exportable_cache import ExportableCache, Session, export, load
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.multimodal import modalities_of

from .support.models import tiny_model, tokens
from .support.multimodal import prompt, reference_logits, tiny_multimodal

TOLERANCE = 1e-4
#: Kind and embeddings per item, by family.
FAMILIES = {"llava": ("image", 4), "smolvlm": ("image", 4), "voxtral": ("audio", 3)}
STEPS = 24


def live(family: str, **options: Any) -> tuple[Session, PreTrainedModel]:
    model = tiny_multimodal(family)
    cache = ExportableCache.from_model(model, 64)
    return Session.from_model(model, cache, prefill_length=16, modalities=[FAMILIES[family][0]], **options), model


def largest_difference(session: Session, model: PreTrainedModel, family: str) -> float:
    """Over one item and two, in prompts of one chunk of prefill and of more, each with 24 steps after it."""
    differences = []
    for items, length in ((1, 5), (2, 30)):
        inputs = prompt(model, items, length, FAMILIES[family][1], seed=items)
        following = tokens(STEPS, seed=items).clamp(max=100)
        expected = reference_logits(model, inputs, following)
        model.set_attn_implementation("exportable_cache")
        session.reset()
        rows = [session.prefill(**inputs)] + [session.decode(following[:, position]) for position in range(STEPS)]
        differences.append((torch.stack(rows, 1) - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_sessions_equal_the_whole_model(family: str) -> None:
    session, model = live(family)
    assert largest_difference(session, model, family) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_sessions_equal_the_whole_model(family: str) -> None:
    session, model = live(family, compile=True, buckets=False)
    assert largest_difference(session, model, family) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_pt2_bundles_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    model = tiny_multimodal(family)
    kind = FAMILIES[family][0]
    model.save_pretrained(tmp_path / family)
    bundle = export(
        tmp_path / family, target="pt2", max_cache_len=64, prefill_length=16, modalities=[kind], output_dir=tmp_path / "bundle"
    )
    assert bundle.manifest.verification["passed"] is True
    methods = bundle.manifest.program.methods
    assert set(methods) == {"decode", "prefill", f"encode_{kind}", "embed", "prefill_embeds"}
    assert methods["prefill_embeds"].inputs[0].shape == ["batch", "length", 32]
    assert largest_difference(load(bundle.path), model, family) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_seen_or_heard_matters(family: str) -> None:
    model = tiny_multimodal(family)
    inputs = prompt(model, 1, 5, FAMILIES[family][1])
    name = next(name for name in inputs if name != "input_ids")
    other = {**inputs, name: inputs[name].flip(-1)}
    following = tokens(3)
    assert (reference_logits(model, inputs, following) - reference_logits(model, other, following)).abs().amax(-1).min() > 0.01


def test_refused_inputs() -> None:
    session, model = live("llava")
    inputs = prompt(model, 1, 5, 4)
    for changed, message in (
        ({"pixel_values": torch.randn(1, 3, 8, 8)}, r"must be \[items, 3, 16, 16\]"),
        ({"pixel_values": torch.randn(2, 3, 16, 16)}, "encode_image gives 8 embeddings"),
        ({"pixel_values": inputs["pixel_values"].double()}, "must be torch.float32"),
        ({"input_features": torch.randn(1, 8, 12)}, "got 'input_features'"),
    ):
        with pytest.raises(InputError, match=message):
            session.prefill(**{**inputs, **changed})
    with pytest.raises(InputError, match="the prompt has 4 tokens of id 127, encode_image gives 0"):
        session.prefill(inputs["input_ids"])
    assert session.length.tolist() == [0]


def test_models_that_need_more_are_refused() -> None:
    text = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="'llama' has not been tried with images or sound"):
        modalities_of(text, ["image"])
    with pytest.raises(InputError, match="make it, or export, with modalities="):
        Session.from_model(text, ExportableCache.from_model(text, 32)).prefill(tokens(3), pixel_values=torch.zeros(1, 3, 8, 8))
    text.config.model_type = "gemma3"
    with pytest.raises(UnsupportedModelError, match="see each other in both directions"):
        modalities_of(text, ["image"])


def test_warm_up_runs_what_embeds_too() -> None:
    session, model = live("llava")
    session.warm_up()
    assert session.length.tolist() == [0]
    assert largest_difference(session, model, "llava") <= TOLERANCE
