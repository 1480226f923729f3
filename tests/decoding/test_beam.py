"""Beam search finds what transformers' beam search finds."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from exportable_cache.decoding import beam_search
from exportable_cache.errors import InputError

from ..support.models import tiny_model, tokens
from ..support.sessions import live_session, lowered_session


@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("length", [4, 8, 15])
def test_answers_are_those_of_transformers(beams: int, length: int) -> None:
    model = tiny_model("gemma3_text")
    prompt = tokens(length, seed=length)
    model.set_attn_implementation("eager")
    expected = model.generate(
        prompt,
        past_key_values=DynamicCache(config=model.config),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=14,
        do_sample=False,
        early_stopping=True,
        eos_token_id=[2, 60],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    session = live_session(model, False, 48, batch_size=beams)
    found = beam_search(session, prompt, 14, end_tokens=[2, 60])
    for hypothesis, row in zip(found, expected.sequences, strict=True):
        answer = row[length:].tolist()
        assert hypothesis.tokens == answer[: len(hypothesis.tokens)]
        assert not any(answer[len(hypothesis.tokens) :])
    if beams > 1:
        scores = torch.tensor([hypothesis.score for hypothesis in found])
        torch.testing.assert_close(scores, expected.sequences_scores, atol=1e-4, rtol=0)


def test_one_prompt_only() -> None:
    model = tiny_model("llama")
    session: Any = live_session(model, False, 48, batch_size=2)
    with pytest.raises(InputError, match="max_new_tokens must be an int of at least 1 for beam search"):
        beam_search(session, tokens(4), None)
    with pytest.raises(InputError, match="input_ids must be one prompt"):
        beam_search(session, tokens(4, batch_size=2), 3)
    session.prefill(tokens(4, batch_size=2))
    with pytest.raises(InputError, match="input_ids must be one prompt"):
        beam_search(session, tokens(4, batch_size=2), 3)
    assert session.length.tolist() == [4, 4]  # a refused call changes nothing


@pytest.mark.full
@pytest.mark.parametrize("form", ["resident", "explicit"])
def test_exported_programs_give_the_same_beams(form: str) -> None:
    """An explicit program has other cache tensors after every step: reordering the first ones would go unseen."""
    model = tiny_model("gemma3_text")
    prompt = tokens(5)
    expected = beam_search(live_session(model, False, 48, batch_size=3), prompt, 14)
    found = beam_search(lowered_session(model, "pt2", 48, batch_size=3, form=form), prompt, 14)
    assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in expected]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(
        [hypothesis.score for hypothesis in expected], abs=1e-4
    )
