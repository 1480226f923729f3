"""Prompts with items, several of them in a batch: each row equals the whole model on its prompt alone."""

import pytest
import torch
from torch.nn.functional import pad

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError

from ..support.models import tokens
from ..support.multimodal import FAMILIES, prompt, reference_logits, tiny_multimodal

STEPS = 6


def batch_of(prompts: list[dict[str, torch.Tensor]], side: str) -> dict[str, torch.Tensor]:
    """What a processor would give: ids padded on a side, items of all rows in order."""
    longest = max(each["input_ids"].shape[1] for each in prompts)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        missing = longest - tensor.shape[1]
        return pad(tensor, (missing, 0) if side == "left" else (0, missing))

    found = {"attention_mask": torch.cat([padded(torch.ones_like(each["input_ids"])) for each in prompts])}
    for name, tensor in prompts[0].items():
        by_token = tensor.shape == prompts[0]["input_ids"].shape
        found[name] = torch.cat([padded(each[name]) if by_token else each[name] for each in prompts])
    return found


@pytest.mark.parametrize(
    "family, side",
    [
        ("qwen2_5_vl", "left"),
        *(
            pytest.param(family, side, marks=pytest.mark.full)
            for family, side in (("qwen2_5_vl", "right"), ("qwen3_vl", "left"), ("llava", "right"), ("voxtral", "left"))
        ),
    ],
)
def test_rows_of_different_length_equal_the_whole_model(family: str, side: str) -> None:
    kind, per_item, options = FAMILIES[family]
    model = tiny_multimodal(family)
    prompts = [
        prompt(model, 1, 5, per_item, seed=1),
        prompt(model, 2, 21, per_item, seed=2, start=9, apart=5),
        prompt(model, 1, 30, per_item, seed=3, start=0),
    ]
    following = tokens(STEPS).clamp(max=100)
    expected = torch.cat([reference_logits(model, each, following) for each in prompts])
    cache = ExportableCache.from_model(model, 64, batch_size=3)
    session = Session.from_model(model, cache, modalities=[kind], prefill_chunk=16, **options)
    rows = [session.prefill(**batch_of(prompts, side))]
    rows += [session.decode(following[:, step].expand(3)) for step in range(STEPS)]
    assert (torch.stack(rows, dim=1) - expected).abs().max() <= 1e-4


def test_items_whose_tokens_see_each_other_need_equal_rows() -> None:
    model = tiny_multimodal("gemma3")
    prompts = [prompt(model, 1, length, 16, seed=length) for length in (5, 9, 9)]
    cache = ExportableCache.from_model(model, 64, batch_size=2)
    session = Session.from_model(model, cache, modalities=["image"], prefill_chunk=20)
    with pytest.raises(InputError, match=r"rows must have equal length .* got \[21, 25\]"):
        session.prefill(**batch_of(prompts[:2], "left"))
    expected = torch.cat([reference_logits(model, each, tokens(1))[:, 0] for each in prompts[1:]])
    model.set_attn_implementation("exportable_cache")
    assert (session.prefill(**batch_of(prompts[1:], "left")) - expected).abs().max() <= 1e-4
