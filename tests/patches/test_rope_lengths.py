"""Rotary embeddings that change with the length: the originals take one length for all, ours that of each row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from exportable_cache.common.patch import Patch
from exportable_cache.errors import UnsupportedModelError
from exportable_cache.models.patches.mechanisms import rope
from exportable_cache.models.patches.mechanisms.rope import check_follows, rope_by
from exportable_cache.models.patches.registry import patch_model

from ..support.models import tiny_model

BORDER = 16
MODELS = Path(transformers.__file__).parent / "models"
ROPE: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": BORDER,
            "short_factor": [1.0] * 4, "long_factor": [1.5, 4.0, 16.0, 40.0],
        }
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": BORDER,
    },
}  # fmt: skip
POSITIONS = torch.tensor([[3, 4], [30, 31]])


def rotary(kind: str) -> LlamaRotaryEmbedding:
    model = tiny_model("llama", **copy.deepcopy(ROPE[kind]))
    patch_model(model)
    return model.model.rotary_emb


def angles(module: LlamaRotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    return torch.cat(module(torch.zeros(1), positions))


@pytest.mark.parametrize("kind", ROPE)
def test_the_original_gives_a_row_what_its_neighbours_ask_for(kind: str) -> None:
    """Fails once upstream is right; then the patch can go."""
    alone, together = angles(rotary(kind), POSITIONS[:1]), angles(rotary(kind), POSITIONS)[::2]
    assert (alone - together).abs().max() > 0.1


def test_the_original_gives_a_sequence_what_the_one_before_asked_for() -> None:
    module, positions = rotary("dynamic"), torch.arange(18)[None]
    before = angles(module, positions)
    angles(module, POSITIONS)
    assert (angles(module, positions) - before).abs().max() > 0.01


@pytest.mark.parametrize("kind", ROPE)
def test_rows_get_their_own_and_nothing_is_kept(kind: str) -> None:
    module = rotary(kind)
    for _ in range(2):
        with rope_by(torch.tensor([5, 32])):
            found = angles(module, POSITIONS)
        for row, lengths in enumerate(POSITIONS):
            expected = angles(rotary(kind), lengths[None])
            torch.testing.assert_close(found[[row, row + 2]], expected, rtol=0, atol=1e-6)
    assert torch.equal(module.inv_freq, module.original_inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROPE)
def test_frequencies_in_the_dtype_that_upstream_keeps_them_in(kind: str, dtype: torch.dtype) -> None:
    for positions in (POSITIONS[:1], POSITIONS[1:]):
        with rope_by(positions[:, -1] + 1):
            found = angles(rotary(kind).to(dtype), positions)
        torch.testing.assert_close(found, angles(rotary(kind).to(dtype), positions), rtol=0, atol=1e-6)


def test_one_source_for_every_modeling_file() -> None:
    """The digest is that of the decorator, which each file imports; PhiMoE's own branch has its own."""
    assert Patch(
        "llama.modeling_llama", "LlamaRotaryEmbedding.forward", None, "", (), source="dynamic_rope_update"
    ).digest() in (rope._COPIES, rope._REPLACES)
    assert Patch("phimoe.modeling_phimoe", "PhimoeRotaryEmbedding.forward", None, "", ()).digest() in rope._PHIMOE
    for path in MODELS.glob("*/modeling_*.py"):
        source = path.read_text()
        if "@dynamic_rope_update" in source:
            assert "modeling_rope_utils import" in source and "def dynamic_rope_update" not in source, path


def test_code_of_others_is_refused_where_rows_get_past_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", **copy.deepcopy(ROPE["longrope"]))

    class Custom(LlamaRotaryEmbedding):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return super().forward(x, position_ids)

    model.model.rotary_emb.__class__ = Custom
    assert "LlamaRotaryEmbedding" not in patch_model(model)
    with pytest.raises(UnsupportedModelError, match="Custom is not a class of transformers, and its RoPE .longrope."):
        check_follows(model)
