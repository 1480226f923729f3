"""Prompts to token ids."""

from __future__ import annotations

import pytest
import torch

from exportable_cache.decoding import encode_prompt
from exportable_cache.errors import InputError

from .byte_tokenizer import byte_tokenizer


def test_text_prompt_is_tokenized_as_it_is() -> None:
    tokenizer = byte_tokenizer(chat=True)
    ids = encode_prompt(tokenizer, "[user]hi")
    assert ids.dtype == torch.int64
    assert ids.shape == (1, 8)
    assert tokenizer.decode(ids[0]) == "[user]hi"
    assert encode_prompt(tokenizer, "").shape == (1, 0)


def test_messages_go_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer(chat=True)
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}])
    assert tokenizer.decode(ids[0]) == "[user]hi[assistant]é>"


def test_messages_without_template_are_refused() -> None:
    with pytest.raises(InputError, match="1 chat messages.*no chat template.*pass the prompt as text"):
        encode_prompt(byte_tokenizer(), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", [3, None, [], ["hi"], [1, 2]])
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(InputError, match="prompt must be text, or chat messages .*got"):
        encode_prompt(byte_tokenizer(chat=True), prompt)
