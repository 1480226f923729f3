"""A reduced vocabulary: logits of the kept tokens are the model's, and others are minus infinity."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.models.vocabulary import VOCABULARY_FILE, keep_tokens, kept_tokens, read_vocabulary
from exportable_cache.verification.verify import verify

from .support.models import VOCAB, tiny_model

KEPT = (2, 5, 7, 31, 64, 65, 100, 127)
IDS = torch.tensor([[9, 1, 99, 3]])


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "mixtral"])
def test_kept_logits_are_those_of_the_model(family: str) -> None:
    """Compare with the whole model; Gemma 2 has a tied head and caps its logits."""
    model = tiny_model(family)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    fewer = keep_tokens(model, KEPT, [2])
    found, expected = fewer(IDS).logits, model(IDS).logits
    assert torch.allclose(found[..., KEPT], expected[..., KEPT], rtol=0, atol=1e-5)
    others = [token for token in range(VOCAB) if token not in KEPT]
    assert found.shape == expected.shape and bool(found[..., others].isneginf().all())
    assert kept_tokens(fewer) == list(KEPT) and kept_tokens(model) is None
    # The model itself is unchanged, and shares everything but the head.
    assert model.get_output_embeddings() is head and head.out_features == VOCAB
    assert fewer.get_input_embeddings().weight is table.weight


def test_a_quantised_head_has_the_kept_rows() -> None:
    fewer = keep_tokens(tiny_model("llama"), KEPT)
    quantised = quantize(fewer, Quantization("8w", embeddings="8w"))
    assert quantised.model.get_output_embeddings().weight.shape[0] == len(KEPT)
    assert bool(quantised.model(IDS).logits[..., KEPT].isfinite().all())
    assert quantised.weights_bytes < quantize(tiny_model("llama"), Quantization("8w", embeddings="8w")).weights_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have at least one token id, got none in"),
        ("[]", "must have at least one token id"),
        ("1 2 x", "must be token ids, got 'x' in"),
        ("1 -2", "must be token ids, got '-2'"),
        ("1.5", "must be token ids, got '1.5'"),
        ("99999999999", "must be token ids, got '99999999999'"),
        ("[[1], 2]", r"must be token ids, got '\[1\]'"),
        ("3 2 3", "must have each token id once, got 3 twice"),
    ],
)
def test_files_that_are_no_token_ids_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ids"
    path.write_text(text)
    with pytest.raises(InputError, match=f"vocabulary {said}"):
        read_vocabulary(path)


def test_ids_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    for text in ("[5, 2]", "5 2", "5\n2\n", "5,2"):
        path.write_text(text)
        assert read_vocabulary(path) == (2, 5) == read_vocabulary([5, 2])
    for given in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="must be a file of token ids, got .*: no such file"):
            read_vocabulary(given)
    values: list[Any] = [[True, 2], [None], 5, 1.5, b"abc", None]
    for given in values:
        with pytest.raises(InputError, match="must be token ids, got "):
            read_vocabulary(given)
    with pytest.raises(InputError, match="cannot be read from ~nouser/x"):
        read_vocabulary("~nouser/x")


def test_ids_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(InputError, match="from 0 to 127, the logits of LlamaForCausalLM, got 128"):
        export(model, "pt2", 64, tmp_path / "out", vocabulary=[2, 128])
    with pytest.raises(InputError, match="tokens that end a generation, got ids without 2; add them"):
        export(model, "pt2", 64, tmp_path / "out", vocabulary=[3, 4])
    with pytest.raises(InputError, match="tensor_parallel=2 cannot be combined with vocabulary"):
        export(model, "pt2", 64, tmp_path / "out", vocabulary=[2], tensor_parallel=2)
    with pytest.raises(InputError, match="got ids without 2; add them"):
        export(model, "pt2", 64, tmp_path / "out", vocabulary=[3, 4], dry_run=True)
    with pytest.raises(InputError, match="got ids without .*; add them"):
        export("demo", "pt2", 64, tmp_path / "out", vocabulary=[3, 4], dry_run=True)
    assert not (tmp_path / "out").exists()


def test_a_bundle_has_the_logits_of_the_kept_tokens(tmp_path: Path) -> None:
    """Export, verify again, generate; then verify with a damaged head, which must not pass."""
    model = tiny_model("llama", num_hidden_layers=1)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(KEPT))
    bundle = export(model, "pt2", 32, tmp_path / "out", prefill_chunk=1, vocabulary=ids)
    manifest = bundle.manifest
    assert json.loads((bundle.path / VOCABULARY_FILE).read_text()) == list(KEPT)
    assert manifest.files[VOCABULARY_FILE].holds == "ids of the tokens that have logits"
    assert f"kept the logits of {len(KEPT)} of {VOCAB} tokens" in manifest.remarks
    assert manifest.logits_size is None
    with load(bundle.path, trust=True) as session:
        logits = session.prefill(IDS)
        assert logits.isfinite().nonzero()[:, 1].tolist() == list(KEPT)
        assert {int(token) for token in session.generate(IDS, max_new_tokens=8)} <= set(KEPT)
    assert verify(bundle.path, model, trust=True, prompts=[4], decode_steps=3).passed
    damaged = copy.deepcopy(model)
    damaged.lm_head.weight.data[KEPT[3]] += 0.1
    assert not verify(bundle.path, damaged, trust=True, prompts=[4], decode_steps=3).passed
    # Rows that are left out may be anything.
    damaged = copy.deepcopy(model)
    damaged.lm_head.weight.data[KEPT[3] + 1] += 0.1
    assert verify(bundle.path, damaged, trust=True, prompts=[4], decode_steps=3).passed
