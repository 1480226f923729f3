"""Streaming text: pieces never split a character and join to the whole; stop strings never leak."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from exportable_cache.decoding import StopStrings, TextStream, encode_prompt
from exportable_cache.errors import InputError

from .byte_tokenizer import END, SIZE, byte_tokenizer

TEXT = "naïve café, 你好, 👩‍🚀 ok\n"


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading space mark, as sentencepiece has them, and bytes for what is missing."""
    words = ["▁", "▁the", "▁code", "is", "▁a", ".", "▁▁"]
    vocab = [("<unk>", 0.0), *((word, -1.0) for word in words), *((f"<0x{byte:02X}>", -5.0) for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def stream(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> list[str]:
    pieces = TextStream(tokenizer)
    return [*(pieces.push(token) for token in tokens), pieces.finish()]


def test_characters_come_whole_and_as_soon_as_complete() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(TEXT)["input_ids"]
    assert len(tokens) == len(TEXT.encode())
    pieces = stream(tokenizer, tokens)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert pieces[-1] == ""


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_join_to_the_whole(seed: int) -> None:
    # Mostly invalid UTF-8: replacement characters come out too, in the end.
    tokenizer = byte_tokenizer()
    tokens = [random.Random(seed).randrange(SIZE) for _ in range(60)]
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_unfinished_character_comes_with_finish() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a你")["input_ids"][:-1]
    assert stream(tokenizer, tokens) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_give_no_text() -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    tokens = tokenizer("ab")["input_ids"]
    assert stream(tokenizer, [end, tokens[0], end, tokens[1], end]) == ["", "a", "", "b", "", ""]


@pytest.mark.parametrize("seed", range(10))
def test_leading_spaces_of_words_are_kept(seed: int) -> None:
    tokenizer = metaspace_tokenizer()
    words = [tokenizer.convert_tokens_to_ids(word) for word in ("▁", "▁the", "▁code", "is", "▁a", ".", "▁▁")]
    tokens = random.Random(seed).choices(words, k=30)
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)
    assert "the code" in "".join(stream(tokenizer, words))


def test_byte_fallback_holds_back_until_the_character_is_complete() -> None:
    tokenizer = metaspace_tokenizer()
    the = tokenizer.convert_tokens_to_ids("▁the")
    tokens = [the, *(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é€".encode()), the]
    assert "".join(stream(tokenizer, tokens)) == "theé€ the"


def test_stop_string_is_cut_off_wherever_it_is_split() -> None:
    text, stop = "first line\n\nUser: second", "\n\nUser:"
    for first in range(len(text)):
        for second in range(first, len(text)):
            stops = StopStrings([stop])
            given = ""
            for piece in (text[:first], text[first:second], text[second:]):
                if not stops.stopped:
                    given += stops.push(piece)
                assert "first line".startswith(given)
            assert stops.stopped
            assert given == "first line"


def test_false_start_is_given_back() -> None:
    stops = StopStrings(["abcabd"])
    pieces = [stops.push(char) for char in "xabcabcaby"]
    # "abcab" is held; the second "c" shows that only its last "abc" can still begin the string.
    assert pieces == ["x", "", "", "", "", "", "abc", "", "", "abcaby"]
    assert not stops.stopped
    assert stops.finish() == ""


def test_held_text_comes_with_finish() -> None:
    stops = StopStrings(["END"])
    assert [stops.push("the E"), stops.push("N"), stops.finish()] == ["the ", "", "EN"]


def test_first_of_several_strings_ends() -> None:
    stops = StopStrings(["zz", "b", "abc"])
    assert stops.push("xxabczz") == "xx"
    assert stops.stopped


def test_without_strings_all_passes() -> None:
    stops = StopStrings([])
    assert stops.push("anything") == "anything"
    assert not stops.stopped


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
    with pytest.raises(InputError, match="prompt is .*pass text, or chat messages"):
        encode_prompt(byte_tokenizer(chat=True), prompt)
