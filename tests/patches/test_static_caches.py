"""Modules that are wrong over a static cache, or keep their state elsewhere: right with a patch, wrong without it."""

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.models.patches.patch import ORIGINAL
from exportable_cache.models.patches.registry import PATCHES, patch_model

from ..zoo.architectures import architectures
from ..zoo.build import STEPS, cached_logits, tiny_model, tokens
from ..zoo.check import check

#: Model type -> the patched class it shows.
SHOWN = {
    "gpt_neo": "GPTNeoSelfAttention",
    "led": "LEDDecoderAttention",
    "minimax": "MiniMaxLightningAttention",
    "moonshine_streaming": "MoonshineStreamingDecoder",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
}
DECODERS = ["gpt_neo", "minimax", "recurrent_gemma"]


def row_of(model_type: str):
    return next(row for row in architectures() if row.model_type == model_type)


def outcome(model_type: str) -> dict:
    facts: dict = {}
    check(row_of(model_type), ["eager"], facts.update)
    return facts["targets"]["eager"]


@pytest.mark.parametrize("model_type", SHOWN)
def test_patched_it_is_the_model(model_type: str) -> None:
    found = outcome(model_type)
    assert found["status"] == "pass", found


@pytest.mark.parametrize("model_type", SHOWN)
def test_the_original_still_is_not(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once upstream is right: then the family's entry in PATCHES can go."""
    model = tiny_model(row_of(model_type))
    assert SHOWN[model_type] in patch_model(model)
    (kind,) = {type(module) for module in model.modules() if type(module).__name__ == SHOWN[model_type]}
    monkeypatch.setattr(kind, "forward", getattr(kind.forward, ORIGINAL))
    others = tuple(patch for patch in PATCHES[model_type] if patch.label != SHOWN[model_type])
    monkeypatch.setitem(PATCHES, model_type, others)
    assert outcome(model_type)["status"] != "pass"


def test_every_patch_is_shown() -> None:
    labels = {patch.label for model_type in SHOWN for patch in PATCHES[model_type]}
    assert labels - set(SHOWN.values()) == {"MiniMaxModel", "RecurrentGemmaModel"}


@pytest.mark.parametrize("model_type", DECODERS)
def test_two_rows_are_each_row_alone(model_type: str) -> None:
    model = tiny_model(row_of(model_type))
    ids = torch.cat([tokens(0), tokens(1)])
    if model_type == "minimax":  # takes no cache but its own
        expected = torch.stack(
            [model(ids[row : row + 1], use_cache=False).logits[0, 5 : 6 + STEPS] for row in range(2)]
        )
    else:
        expected = torch.stack([cached_logits(model, ids[row : row + 1], 6) for row in range(2)])
    session = Session.from_model(model, ExportableCache.from_model(model, 64, batch_size=2), prefill_chunk=16)
    rows = [session.prefill(ids[:, :6])] + [session.decode(ids[:, at]) for at in range(6, 6 + STEPS)]
    assert (torch.stack(rows, 1) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("model_type", ["gpt_neo", "recurrent_gemma"])
def test_a_cache_from_the_config_is_the_one_from_the_model(model_type: str) -> None:
    model = tiny_model(row_of(model_type))
    from_config = ExportableCache.from_config(model.config, 32, attn_implementation=None)
    assert repr(from_config) == repr(ExportableCache.from_model(model, 32, attn_implementation=None))


@pytest.mark.parametrize("model_type", DECODERS)
@torch.no_grad()
def test_transformers_own_caches_go_to_the_original(model_type: str) -> None:
    model, ids = tiny_model(row_of(model_type)), tokens()[:, :12]
    before = model(ids, use_cache=True).logits
    patch_model(model)
    assert torch.equal(model(ids, use_cache=True).logits, before)
