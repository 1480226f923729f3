"""Text that goes on from a prompt keeps its first space; the answer to messages is a text of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import GenerationConfig, PreTrainedTokenizerFast

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import Completer, CompletionOptions

from ..support.models import tiny_model
from .test_token_text import LLAMA, decoded, with_decoder

WORDS = [f"▁w{index}" for index in range(60)]
SIZE = len(WORDS) + 3
PROMPT = "▁w3"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = with_decoder(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), WORDS)
    found.chat_template = "{{ messages[0].content }}"
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab_size=SIZE)


def session_of(model: Any, tokenizer: PreTrainedTokenizerFast, rows: int = 1) -> Session:
    session = Session.from_model(model, ExportableCache.from_model(model, 32, rows), tokenizer=tokenizer)
    session.generation_config = GenerationConfig()
    return session


def test_text_of_sessions(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    session = session_of(model, tokenizer)
    (prompt,) = tokenizer(PROMPT)["input_ids"]
    tokens = list(session.generate(torch.tensor([[prompt]]), 6))
    whole = decoded(tokenizer, [prompt, *tokens])
    after, alone = whole.removeprefix("w3"), decoded(tokenizer, tokens)
    assert after == f" {alone}"
    for given, text in ((PROMPT, after), ({"input_ids": torch.tensor([[prompt]])}, after), (MESSAGES, alone)):
        session.reset()
        assert "".join(session.stream_text(given, 6)) == text
    session.reset()
    # It goes on from what was given out, too.
    pieces = ["".join(session.stream_text(PROMPT, 3)), "".join(session.stream_text("", 3))]
    assert "".join(pieces) == after and pieces[1].startswith(" ")
    rows = session_of(model, tokenizer, 2)
    assert ["".join(texts) for texts in zip(*rows.stream_text([PROMPT, PROMPT], 6), strict=True)] == [after, after]


def test_stop_strings_see_the_space(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    session = session_of(model, tokenizer)
    (prompt,) = tokenizer(PROMPT)["input_ids"]
    ids = torch.tensor([[prompt]])
    first = next(session.generate(ids, 1))
    session.reset()
    assert list(session.generate(ids, 4, stop=f" {decoded(tokenizer, [first])}")) == [first]


def test_completions(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    completer = Completer(session_of(model, tokenizer))
    ids = completer.encode(PROMPT)
    texts = {}
    for continues in (True, False):
        options = CompletionOptions(max_new_tokens=4, continues=continues)
        texts[continues] = "".join(piece.text for piece in completer.complete(ids, options))
    assert texts[True] == f" {texts[False]}"
