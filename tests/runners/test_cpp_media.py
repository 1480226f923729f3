"""Images and video of kinds that tests/support has no family of, in the C++ session: tiny models of the media zoo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from exportable_cache import export, load
from exportable_cache.models.layers.specs import vocab_size_of
from exportable_cache.program.inputs.modalities import modalities_of

from ..support.store import stored
from ..zoo.media import media_rows, prompt_of, tiny_media_model
from ..zoo.media_items import item
from .conftest import TOLERANCE, Probe, ids
from .test_cpp_items import added, check_equal

pytestmark = pytest.mark.full

#: By what is new in each.
KINDS = {
    "a prompt that sees itself": ("paligemma", "image"),
    "frames of one item": ("llava_onevision", "video"),
    "frames with positions of their own": ("qwen2_5_vl", "video"),
}
#: Tokens of text around one item, around two, and before one that lies behind a chunk of text.
PROMPTS = ((2, 3), (3, 2, 5), (18, 2))
CAPACITY, STEPS = 96, 5


def tiny(model_type: str) -> PreTrainedModel:
    (row,) = (row for row in media_rows() if row.model_type == model_type)
    return tiny_media_model(row)


def bundle_of(model_type: str, kind: str = "image") -> Path:
    model = tiny(model_type)
    options = {"prefill_chunk": 48 if model_type == "paligemma" else 16, "verify": False, "kernels": "executorch"}
    key = {"media": [model_type, kind], "max_cache_len": CAPACITY, **options}
    modalities = {kind: item(model, kind)}
    return stored(key, lambda folder: export(model, "executorch", CAPACITY, folder, modalities=modalities, **options))


@pytest.mark.parametrize("model_type, kind", KINDS.values(), ids=list(KINDS))
def test_what_is_seen_answers_as_in_python(probe: Probe, model_type: str, kind: str) -> None:
    model = tiny(model_type)
    example = item(model, kind)
    (modality,) = modalities_of(model, {kind: example})
    bundle = bundle_of(model_type, kind)
    session = load(bundle)
    commands: list[tuple[object, ...]] = [("open", bundle)]
    expected: list[torch.Tensor | None] = [None]
    inputs: dict[str, torch.Tensor] = {}
    for pieces in PROMPTS:
        given = prompt_of(model, modality, example, pieces)
        inputs = {name: given[name] for name in given if "token_type" not in name and name != "attention_mask"}
        following = torch.randint(5, vocab_size_of(model), (STEPS,), generator=torch.Generator().manual_seed(5))
        session.reset()
        items = added(inputs)
        commands += [("reset",), *items, ("prefill", ids(inputs["input_ids"][0]))]
        expected += [None, *(None for _ in items), session.prefill(**inputs)]
        commands += [("decode", int(token)) for token in following]
        expected += [session.decode(token[None]) for token in following]
    check_equal(probe(*commands), expected)
    # What is shown is seen: the same prompt with another item answers otherwise.
    name = next(name for name in inputs if inputs[name].is_floating_point())
    other = {**inputs, name: inputs[name].flip(-1)}
    *_, reply = probe(("open", bundle), *added(other), ("prefill", ids(inputs["input_ids"][0])))
    assert reply.ok and (torch.tensor(reply.numbers()) - expected[-STEPS - 1][0]).abs().max() > 100 * TOLERANCE
