"""Tokens to text one by one: pieces never split a character, and join to what the tokenizer makes of the whole."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from exportable_cache.decoding import TextStream
from exportable_cache.generation.text import TextPieces, stream_text
from exportable_cache.generation.token_text import TokenTexts

from .byte_tokenizer import END, SIZE, byte_tokenizer

TEXT = "naïve café, 你好, 👩‍🚀 ok\n"
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁▁", "a", "é", "\n", "▁你", ".", "n't", "▁'", "▁s"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


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


def with_decoder(decoder: object, names: list[str]) -> PreTrainedTokenizerFast:
    vocab = {name: index for index, name in enumerate(["<unk>", *names])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Asked(PreTrainedTokenizerFast):
    """A tokenizer that can only be asked to decode, because its class does so itself."""

    def _decode(self, *tokens, **options):
        return super()._decode(*tokens, **options)


PIECES = ["hello", "##ing", ".", ",", "'", "s", "don", "n't", "?", "##s", "do", "not"]
TOKENIZERS = {
    "Llama 2": lambda: with_decoder(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]), FALLBACK + WORDS),
    "Gemma": lambda: with_decoder(decoders.Sequence(LLAMA), FALLBACK + WORDS),
    "Metaspace": lambda: with_decoder(decoders.Metaspace(), WORDS),
    "Metaspace without prefix": lambda: with_decoder(decoders.Metaspace(prepend_scheme="never"), WORDS),
    "bytes, Metaspace, suffixes": lambda: with_decoder(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.BPEDecoder()]), FALLBACK + WORDS
    ),
    "suffixes": lambda: with_decoder(decoders.BPEDecoder(), ["a", "b</w>", "c", "é</w>"]),
    "WordPiece": lambda: with_decoder(decoders.WordPiece(cleanup=False), PIECES),
    "WordPiece with clean-up": lambda: with_decoder(decoders.WordPiece(cleanup=True), PIECES),
    "byte level": byte_tokenizer,
    "no decoder": lambda: with_decoder(None, PIECES),
    "byte level, asked": lambda: Asked(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=END),
    "Llama 2, asked": lambda: Asked(tokenizer_object=TOKENIZERS["Llama 2"]().backend_tokenizer),
    "ByT5": ByT5Tokenizer,
}


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def drawn(draw: random.Random, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of all kinds: where there are bytes, whole characters and broken ones."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    others = [token for token, name in enumerate(names) if name not in FALLBACK]
    characters = [[f"<0x{byte:02X}>" for byte in char.encode()] for char in "é你😊A "] if "<0x00>" in names else [[]]
    tokens: list[int] = []
    for _ in range(draw.randint(1, 12)):
        kind = draw.random()
        if kind < 0.35:
            tokens += tokenizer.convert_tokens_to_ids(draw.choice(characters))
        elif kind < 0.45 and len(characters) > 1:
            tokens.append(tokenizer.convert_tokens_to_ids(draw.choice(FALLBACK)))
        else:
            tokens.append(draw.choice(others))
    return tokens * draw.choice([1, 1, 1, 4])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streams_join_to_the_whole_alone_and_after_a_text(name: str) -> None:
    tokenizer, draw = TOKENIZERS[name](), random.Random(0)
    for _ in range(250):
        tokens = drawn(draw, tokenizer)
        whole = decoded(tokenizer, tokens)
        assert "".join(stream(tokenizer, tokens)) == whole, tokens
        cut = draw.randrange(len(tokens) + 1)
        before = decoded(tokenizer, tokens[:cut])
        if "\N{REPLACEMENT CHARACTER}" not in whole and whole.startswith(before):
            assert before + "".join(stream_text(tokens[cut:], tokenizer, after=tokens[:cut])) == whole, (tokens, cut)


@pytest.mark.parametrize("name", ["Llama 2", "byte level", "byte level, asked", "ByT5"])
@pytest.mark.parametrize("is_broken", [True, False])
def test_time_is_linear_in_tokens(name: str, is_broken: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    if name == "Llama 2":
        tokens = tokenizer.convert_tokens_to_ids(["<0x80>"] if is_broken else ["<0xC3>", "<0xA9>"])
    else:
        tokens = [0x83] if is_broken else tokenizer("é")["input_ids"][:2]

    def seconds(count: int) -> float:
        start = time.perf_counter()
        list(stream_text(tokens * count, tokenizer))
        return time.perf_counter() - start

    few = min(seconds(250) for _ in range(3))
    assert min(seconds(1000) for _ in range(3)) < 9 * few + 0.05


def test_a_run_of_bytes_is_held_until_it_ends_or_is_broken() -> None:
    tokenizer = TOKENIZERS["Llama 2"]()
    ids = tokenizer.convert_tokens_to_ids
    replaced = "\N{REPLACEMENT CHARACTER}"
    assert stream(tokenizer, ids(["<0x41>", "<0xC3>", "<0xA9>", "a"])) == ["", "", "", "Aéa", ""]
    # The decoder takes a run with one wrong byte for wrong from its beginning.
    assert stream(tokenizer, ids(["<0x41>", "<0xA0>", "<0x42>", "a"])) == ["", 2 * replaced, replaced, "a", ""]


def test_a_stop_string_in_a_run_of_bytes_ends_the_text_at_once() -> None:
    tokenizer = TOKENIZERS["Llama 2"]()
    pieces = TextPieces(tokenizer, stop_strings=["A\n"])
    given = [pieces.push(token) for token in tokenizer.convert_tokens_to_ids(["a", "<0x42>", "<0x41>", "<0x0A>"])]
    assert given == ["a", "", "", "B"] and pieces.ended


def test_bytes_of_tokens() -> None:
    texts = TokenTexts(byte_tokenizer())
    ids = byte_tokenizer()("é")["input_ids"]
    assert [texts.bytes(token) for token in ids] == [b"\xc3", b"\xa9"] and texts.bytes(SIZE - 1) == END.encode()
    tokenizer = TOKENIZERS["Llama 2"]()
    texts = TokenTexts(tokenizer)
    names = ["▁the", "a", "<0xC3>", "<s>"]
    assert [texts.bytes(token) for token in tokenizer.convert_tokens_to_ids(names)] == [b" the", b"a", b"\xc3", b"<s>"]
    assert texts.bytes(99999) == b""
    texts = TokenTexts(TOKENIZERS["WordPiece with clean-up"]())
    assert [texts.text(token) for token in texts.tokenizer.convert_tokens_to_ids(["hello", "##s", "."])] == [
        " hello", "s", ".",
    ]  # fmt: skip
