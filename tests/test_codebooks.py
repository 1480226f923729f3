"""Models of which a token is several ids: sessions take rows of them, and refuse what they cannot say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache, Session, export
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.layers.specs import Codebooks

from .zoo.architectures import architectures
from .zoo.build import STEPS, cached_logits, encoder_inputs, tiny_model, tokens

#: Model type -> ids of a token, and kinds of token that it gives logits of.
FAMILIES = {"musicgen": (4, 4), "musicgen_melody": (4, 4), "dia": (9, 9), "kyutai_speech_to_text": (33, 1)}


def model_of(family: str):
    return tiny_model(next(row for row in architectures() if row.model_type == family))


def session_over(model, **options) -> Session:
    return Session.from_model(model, ExportableCache.from_model(model, 64, **options), prefill_chunk=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_the_models(family: str) -> None:
    model = model_of(family)
    ids, inputs = tokens(model), encoder_inputs(model)
    count, kinds = FAMILIES[family]
    assert ids.shape[2] == count
    expected = cached_logits(model, ids, 11, inputs)
    with session_over(model) as session:
        assert session.codebooks == count
        if inputs:
            session.encode(**inputs)
        session.prefill(ids[:, :5])
        rows = [session.prefill(ids[:, 5:11])[0]]
        rows += [session.decode(ids[:, 11 + step])[0] for step in range(STEPS)]
    logits = torch.stack(rows)
    assert logits.shape[1:-1] == (() if kinds == 1 else (kinds,))
    assert (logits - expected).abs().max() <= 1e-4


def test_the_order_of_codebooks() -> None:
    codebooks = Codebooks(3, 10, folds_ids=True, folds_logits=True)
    ids = torch.arange(12).view(2, 2, 3)
    folded = codebooks.taken(ids)
    assert folded.tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert torch.equal(codebooks.given(folded[..., None])[..., 0], ids)


def test_rows_of_different_length() -> None:
    model = model_of("musicgen")
    ids = tokens(model).expand(2, -1, -1)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    with session_over(model, batch_size=2) as session, pytest.raises(InputError, match="one length of all rows"):
        session.prefill(ids[:, :9], attention_mask=mask)
    model = model_of("kyutai_speech_to_text")
    ids = tokens(model).expand(2, -1, -1).clone()
    with session_over(model, batch_size=2) as session:
        logits = session.prefill(ids[:, :7], attention_mask=mask[:, 2:])
    with session_over(model) as alone:
        assert torch.allclose(logits[1:], alone.prefill(ids[1:, 2:7]), atol=1e-4)


def test_what_is_refused(tmp_path: Path) -> None:
    model = model_of("musicgen")
    ids = tokens(model)
    with session_over(model) as session:
        with pytest.raises(InputError, match=r"must have 4 ids for each token, got 3"):
            session.prefill(ids[:, :6, :3])
        with pytest.raises(InputError, match=r"must have shape \[batch, length, codebooks\]"):
            session.prefill(ids[:, :6, 0])
        with pytest.raises(InputError, match=r"must have shape \[batch, codebooks\]"):
            session.decode(ids[:, 0, 0])
        with pytest.raises(InputError, match="from 0 to 128, got 129"):
            session.prefill(torch.full((1, 2, 4), 129))
        with pytest.raises(InputError, match="4 ids, one per codebook"):
            list(session.generate(ids[:, :6], max_new_tokens=2))
        assert session.length.tolist() == [0]
        session.warm_up()
    with pytest.raises(UnsupportedModelError, match="several ids"):
        export(model, "pt2", 32, tmp_path / "out")
