"""Encoder-decoder models from a folder to a bundle and back: plan, export with verification, load, text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.pipeline.plan import plan
from exportable_cache.verification.verify import verify_session

from .decoding.byte_tokenizer import byte_tokenizer
from .support.models import tokens
from .support.seq2seq import encoder_inputs, reference_logits, tiny_seq2seq


def tiny_t5() -> Any:
    """Return a model of one layer; test_seq2seq.py tests what several compute."""
    return tiny_seq2seq("t5", vocab_size=257, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "t5"
    tiny_t5().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Any:
    return export(folder, target="pt2", max_cache_len=24, max_encoder_len=32, output_dir=folder.parent / "bundle")


def test_plan_sizes_both_kinds_of_layers(folder: Path) -> None:
    made = plan(folder, 24, max_encoder_len=32)
    assert [layer.policy for layer in made.layers] == ["full", "cross"]
    assert [layer.slots for layer in made.layers] == [24, 32]
    assert made.architecture == "T5ForConditionalGeneration" and made.max_length == 24
    with pytest.raises(InputError, match="has no encoder; leave it out"):
        plan("demo", 24, max_encoder_len=32)


def test_export_is_verified_and_records_the_methods(bundle: Any) -> None:
    assert bundle.manifest.verification["passed"] is True
    methods = bundle.manifest.model_dump(mode="json")["program"]["methods"]
    assert list(methods) == ["encode", "decode", "prefill"]
    assert [signature["name"] for signature in methods["prefill"]["inputs"]] == [
        "input_ids",
        "input_pos",
        "encoder_hidden_states",
        "encoder_lengths",
    ]
    assert methods["prefill"]["ranges"] == {"encoder_length": [1, 32]} and methods["encode"]["max_length"] == 32
    assert [signature["name"] for signature in methods["decode"]["inputs"]] == ["input_ids", "input_pos"]


def test_a_loaded_bundle_equals_the_model_and_gives_text(bundle: Any) -> None:
    session, model = load(bundle.path), tiny_t5()
    inputs, ids = encoder_inputs(model, 11), tokens(12)
    expected = reference_logits(model, inputs, ids, 1)
    session.encode(**inputs)
    rows = [session.decode(ids[:, position]) for position in range(12)]
    assert (torch.stack(rows, 1) - expected).abs().max() <= 1e-4
    first = "".join(session.stream_text("one two", max_new_tokens=12, temperature=1.0, seed=3))
    other = "".join(session.stream_text("three", max_new_tokens=12, temperature=1.0, seed=3))
    assert "".join(session.stream_text("one two", max_new_tokens=12, temperature=1.0, seed=3)) == first
    assert other != first


def test_verification_sees_another_encoder(bundle: Any) -> None:
    model = tiny_t5()
    assert verify_session(load(bundle.path), model, prompts=[3], decode_steps=4).passed
    with torch.no_grad():
        model.encoder.block[0].layer[0].SelfAttention.o.weight.mul_(1.5)
    assert not verify_session(load(bundle.path), model, prompts=[3], decode_steps=4).passed
