"""Tokenizers whose library panics or raises: one sentence, wherever they are called."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from exportable_cache.errors import InputError
from exportable_cache.generation.text import encode_prompt, stream_text
from exportable_cache.models.loading.tokenizer import load_tokenizer
from exportable_cache.models.tokenizers.text import TextTokenizer, is_plain, reads_alike, tokenizer_errors

from .decoding.byte_tokenizer import byte_tokenizer

MODEL = {"type": "BPE", "unk_token": None, "vocab": {"a": 0, "b": 1}}
#: Parts of a tokenizer.json with which reading the file panics or raises.
UNREADABLE = {
    "a table of characters that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
    "merges of tokens that there are not": {"model": {**MODEL, "merges": ["a b"]}},
    "a model of no kind": {"model": {"type": "none"}},
}


def _backtracking() -> Tokenizer:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "x": 1}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("((a+)+)+b"), "isolated")
    return inner


def _empty_pattern() -> Tokenizer:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "x": 1}, merges=[]))
    inner.normalizer = normalizers.Replace("", "xx")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return inner


def _without_unknown() -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="[UNK]"))


FAILING = {
    "a pattern that backtracks": (_backtracking, "retry-limit-in-match over"),
    "an empty pattern": (_empty_pattern, "index out of bounds"),
    "an unknown token that the vocabulary lacks": (_without_unknown, r"Missing \[UNK\] token from the vocabulary"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, what: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **UNREADABLE[what]}))
    with pytest.raises(InputError, match=r"cannot read .*tokenizer.json: .*; export the model again"):
        TextTokenizer(tmp_path, lambda: pytest.fail("not asked"))
    with pytest.raises(InputError, match="cannot read the tokenizer of .*; correct its files, or remove them"):
        load_tokenizer(tmp_path)
    assert not reads_alike(tmp_path, byte_tokenizer())


@pytest.mark.parametrize("what", FAILING)
@pytest.mark.parametrize("alone", [True, False])
def test_a_text_that_cannot_be_encoded_is_one_sentence(tmp_path: Path, what: str, alone: bool) -> None:
    make, message = FAILING[what]
    whole = PreTrainedTokenizerFast(tokenizer_object=make())
    whole.chat_template = "{{ messages[0].content }}"
    whole.save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path, lambda: whole) if alone else whole
    text = "x" + "a" * 40
    for prompt in (text, [{"role": "user", "content": text}]):
        with pytest.raises(
            InputError, match=f"the tokenizer cannot encode the (text|prompt): .*{message}.*; "
        ) as caught:
            encode_prompt(tokenizer, prompt)
        assert "\n" not in str(caught.value)


#: Tried at each character, in millions of steps, which are fewer than the library's limit of a match.
SLOW = "a*a*[cd]|a"


@pytest.mark.parametrize("chat", [True, False])
def test_a_pattern_that_is_slow_at_every_character_is_ended(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SLOW), "isolated")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert encode_prompt(tokenizer, "aab").tolist() == [[0, 0, 1]]
    monkeypatch.setattr("exportable_cache.models.tokenizers.text.MOST_SECONDS", 0.3)
    text = "a" * 3000
    start = time.monotonic()
    with pytest.raises(InputError, match="the tokenizer cannot encode the prompt: it runs longer than 0.3 s; shorten"):
        encode_prompt(tokenizer, [{"role": "user", "content": text}] if chat else text)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r" {2,}",
        r"[|)+*]+|\(\)*",
    ],
)  # fmt: skip
def test_well_known_patterns_are_not_tried_first(pattern: str) -> None:
    assert is_plain(pattern)


@pytest.mark.parametrize(
    "pattern",
    [SLOW, "((a+)+)+b", "a|(a|aa)+b", "a?a?a?a?a?b", r"[a]*\[a*", "(a|b", "x{3}{3}", "(?:a?){22}"],
)
def test_others_are(pattern: str) -> None:
    assert not is_plain(pattern)


def test_tokens_that_cannot_be_decoded_are_one_sentence() -> None:
    class Panics:
        def __getattr__(self, name: str) -> None:
            raise panic

    class PanicException(BaseException):
        __module__ = "pyo3_runtime"

    panic = PanicException("index out of bounds")
    with pytest.raises(InputError, match="the tokenizer cannot decode tokens: index out of bounds"):
        list(stream_text([1, 2], Panics()))


def test_what_is_no_error_of_a_tokenizer_passes() -> None:
    for error in (KeyboardInterrupt(), SystemExit(1), MemoryError(), InputError("ours")):
        with pytest.raises(type(error)) as caught, tokenizer_errors("the tokenizer cannot be used"):
            raise error
        assert caught.value is error
