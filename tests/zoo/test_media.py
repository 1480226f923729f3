"""One family a mechanism of pictures and sound; with --full every one that docs/media.json says passes."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.inputs.modality import joined_items
from exportable_cache.program.inputs.probe import prompt_with
from exportable_cache.program.methods import FixedInput
from exportable_cache.verification.references import logits_by_step

from .build import tokens
from .media import STEPS, check_media, media_rows, reference, tiny_media_model
from .media_items import TOWERS, item
from .media_table import DOCUMENT, take_up_media, write_media_table
from .shrink import FIRST_TOKEN, VOCAB

#: By what items reach the decoder, one of each; grids and images that see themselves are in tests/test_multimodal.py.
MECHANISMS = {
    "places, of tiles in a batch": ("idefics3", "image"),
    "sizes, of tiles of one picture": ("llava_next", "image"),
    "one long sequence": ("minicpmv4_6", "image"),
    "places, that the decoder fills itself": ("chameleon", "image"),
    "places, by a token in the encoder's config": ("phi4_multimodal", "audio"),
    "places, by an encoder that reads an instruction": ("instructblip", "image"),
    "features beside, by layer": ("granite4_vision", "image"),
    "features beside, of every token": ("gemma4", "image"),
    "cross-attention, between layers of self-attention": ("mllama", "image"),
    "a prompt that sees itself": ("paligemma", "image"),
    "an item that sees itself beyond the window": ("gemma4_unified", "image"),
    "items that see each other": ("molmo2", "image"),
    "positions by tokens around items": ("qwen2_5_omni_thinker", "video"),
    "frames of sound with lengths": ("qwen2_audio", "audio"),
    "places among the text of an encoder": ("t5gemma2", "image"),
    "places among the text of an encoder that takes embeddings only": ("florence2", "image"),
}
#: Refused, and what the reason must say.
REFUSED = {
    ("minicpmv4_7", "image"): "the positions of an item's tokens depend on more than its start",
    ("hunyuan_vl", "image"): "the positions of an item's tokens depend on more than its start",
}


def _known() -> list[tuple[str, str]]:
    found = json.loads(DOCUMENT.with_suffix(".json").read_text())
    return [
        (name, kind)
        for name, kinds in found.items()
        for kind, targets in kinds.items()
        if targets.get("eager", {}).get("status") == "pass"
    ]


@pytest.mark.parametrize(
    "model_type, kind",
    [
        *MECHANISMS.values(),
        *(pytest.param(*one, marks=pytest.mark.full) for one in _known() if one not in MECHANISMS.values()),
    ],
)
def test_items_equal_the_whole_model(model_type: str, kind: str) -> None:
    (row,) = (row for row in media_rows() if row.model_type == model_type)
    outcome = check_media(row, kind, "eager")
    assert outcome.status == "pass", outcome


@torch.no_grad()
def test_tokens_of_an_item_that_see_each_other_in_some_layers() -> None:
    """As in the larger models of Gemma 4."""
    (row,) = (row for row in media_rows() if row.model_type == "gemma4")
    with mock.patch.dict(TOWERS, {"gemma4_text": {"use_bidirectional_attention": "vision"}}):
        model = tiny_media_model(row)
    outcome = check_media(row, "image", "eager", model)
    assert outcome.status == "pass" and "sees sliding item" in outcome.reason, outcome


def test_a_model_in_half_precision_is_understood_alike() -> None:
    (row,) = (row for row in media_rows() if row.model_type == "qwen3_vl")
    model = tiny_media_model(row)
    example = item(model, "image")
    (whole,) = modalities_of(model, {"image": example})
    (half,) = modalities_of(model.to(torch.bfloat16), {"image": example})
    assert half.dtype == "bfloat16" and half.facts == whole.facts and half.extra_features == whole.extra_features


@torch.no_grad()
def test_frames_that_lie_apart_are_items_of_their_own() -> None:
    """As a processor gives them: one grid for a video, each frame behind its time."""
    (row,) = (row for row in media_rows() if row.model_type == "qwen3_vl")
    model = tiny_media_model(row)
    video = item(model, "video")
    (modality,) = modalities_of(model, {"video": video})
    frames = joined_items([video, item(model, "video", 1)], 0)
    frames["video_grid_thw"] = torch.tensor([[2, *video["video_grid_thw"][0, 1:].tolist()]])
    prompt = prompt_with(model, "video", (3, 2, 4), modality.tokens, modality.token_id, **frames)
    following = torch.randint(FIRST_TOKEN, VOCAB, (1, STEPS), generator=torch.Generator().manual_seed(5))
    expected = reference(model, prompt, following)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), modalities={"video": video})
    rows = [session.prefill(**prompt)] + [session.decode(following[:, step]) for step in range(STEPS)]
    assert (torch.stack(rows, dim=1) - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_text_runs_in_the_language_model_where_the_model_needs_an_item() -> None:
    """BLIP-2 requires pixels in every call, so a prompt of text, and its reference, run in the language model inside."""
    (row,) = (row for row in media_rows() if row.model_type == "blip-2")
    model = tiny_media_model(row)
    ids = tokens(model, length=6)
    expected = model.language_model(ids).logits
    session = Session.from_model(model, ExportableCache.from_model(model, 16), modalities=["image"])
    assert (session.prefill(ids) - expected[:, -1]).abs().max() <= 1e-4
    found = torch.stack(list(logits_by_step(model, ids, 4, None)), dim=1)
    assert (found - expected[:, 3:]).abs().max() <= 1e-4


def test_the_page_is_gone_on_from(tmp_path: Path) -> None:
    """What was run here stays, and the page that is written again has the reasons of those that were not."""
    page = tmp_path / "media.md"
    take_up_media(tmp_path / "results")
    assert json.loads((tmp_path / "results" / "blip.json").read_text())["image"]["eager"]["reason"]
    here = {"image": {"eager": {"status": "wrong", "difference": 1.0, "reason": "places"}}}
    (tmp_path / "results" / "blip.json").write_text(json.dumps(here))
    take_up_media(tmp_path / "results")
    write_media_table(tmp_path / "results", page)
    assert json.loads((tmp_path / "results" / "blip.json").read_text()) == here
    written, kept = page.read_text(), json.loads(DOCUMENT.with_suffix(".json").read_text())
    assert "Wrong: 1." in written and "has no placeholder token for" in written
    assert json.loads(page.with_suffix(".json").read_text()) == {**kept, "blip": here}


def test_an_item_larger_than_the_cache_is_refused_with_its_tokens() -> None:
    (row,) = (row for row in media_rows() if row.model_type == "qwen2_vl")
    model = tiny_media_model(row)
    with pytest.raises(
        InputError, match="max_cache_len must be at least 6, the embeddings of one image of this size, got 5"
    ):
        Session.from_model(model, ExportableCache.from_model(model, 5), modalities={"image": item(model, "image")})


def test_items_of_an_encoder_are_checked_row_by_row() -> None:
    """A row without an image, or with part of one, would get the embeddings of another row's."""
    (row,) = (row for row in media_rows() if row.model_type == "t5gemma2")
    model = tiny_media_model(row)
    pixels = torch.cat([item(model, "image", seed)["pixel_values"] for seed in (1, 2)])
    cache = ExportableCache.from_model(model, 16, batch_size=2, max_encoder_len=8, attn_implementation=None)
    with Session.from_model(model, cache, modalities=["image"]) as session:
        token, count = model.config.image_token_id, session.runner.methods["encode"].item.tokens
        ids = torch.full((2, count + 2), FIRST_TOKEN)
        text = session.encode(input_ids=ids)
        ids[:, 1:-1] = token
        both = session.encode(input_ids=ids, pixel_values=pixels)
        assert torch.allclose(session.encode(input_ids=ids, pixel_values=pixels.flip(0)), both.flip(0), atol=1e-5)
        assert (both[0] - both[1]).abs().max() > 1e-2 and (both - text).abs().max() > 1e-2
        with pytest.raises(InputError, match=f"each row of input_ids must have {count} placeholders {token} with"):
            session.encode(input_ids=ids)
        ids[1, 1] = FIRST_TOKEN
        with pytest.raises(InputError, match=rf"got \[{count}, {count - 1}\] with pixel_values"):
            session.encode(input_ids=ids, pixel_values=pixels)
        with pytest.raises(InputError, match="pixel_values must have shape"):
            session.encode(input_ids=ids, pixel_values=pixels[:1])


def test_a_mask_of_ones_is_contiguous() -> None:
    """ExecuTorch refused constants that a single value was expanded to, such as the masks of Gemma 4 and Phi-4."""
    mask = torch.ones(1, 3, 4)
    tensor = FixedInput.of(mask).tensor()
    assert tensor.is_contiguous() and torch.equal(tensor, mask)


@pytest.mark.parametrize("model_type, kind", REFUSED)
def test_what_is_not_understood_is_refused(model_type: str, kind: str) -> None:
    (row,) = (row for row in media_rows() if row.model_type == model_type)
    outcome = check_media(row, kind, "eager")
    assert outcome.status == "refused" and REFUSED[model_type, kind] in outcome.reason, outcome
