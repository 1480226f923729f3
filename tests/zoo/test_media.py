"""One family a mechanism of pictures and sound; with --full every one that docs/media.json says passes."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from .media import check_media, media_rows, tiny_media_model
from .media_items import TOWERS
from .media_table import DOCUMENT

#: By what items reach the decoder, one of each; grids and images that see themselves are in tests/test_multimodal.py.
MECHANISMS = {
    "places, of tiles in a batch": ("idefics3", "image"),
    "sizes, of tiles of one picture": ("llava_next", "image"),
    "one long sequence": ("minicpmv4_6", "image"),
    "features beside, by layer": ("granite4_vision", "image"),
    "features beside, of every token": ("gemma4", "image"),
    "a prompt that sees itself": ("paligemma", "image"),
    "positions by tokens around items": ("qwen2_5_omni_thinker", "video"),
    "frames of sound with lengths": ("qwen2_audio", "audio"),
}
#: Refused, and what the reason must say.
REFUSED = {
    ("hunyuan_vl", "image"): "the positions of its tokens depend on more than where an item starts",
    ("blip", "image"): "names no token that stands for image",
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


@pytest.mark.parametrize("model_type, kind", REFUSED)
def test_what_is_not_understood_is_refused(model_type: str, kind: str) -> None:
    (row,) = (row for row in media_rows() if row.model_type == model_type)
    outcome = check_media(row, kind, "eager")
    assert outcome.status == "refused" and REFUSED[model_type, kind] in outcome.reason, outcome
