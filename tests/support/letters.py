"""A tokenizer of single letters, for the tiny models."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .models import VOCAB

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{% endfor %}a"


def letter_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character from "0" on, VOCAB in all; ids 0 to 2 are special."""
    characters = [chr(code) for code in range(ord("0"), ord("0") + VOCAB - 3)]
    vocabulary = {
        "<pad>": 0,
        "<bos>": 1,
        "<eos>": 2,
        **{character: index + 3 for index, character in enumerate(characters)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast
