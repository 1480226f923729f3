"""Text in C++: tokenizers of every kind give the ids and the pieces that they give in Python."""

import codecs
import json
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from exportable_cache.decoding import StopStrings, TextStream
from exportable_cache.generation.text import TextPieces

from ..decoding.test_token_text import TOKENIZERS, drawn
from .conftest import Probe, Reply, hexed, ids

TEXTS = [
    "the code of amber is 4821.",
    " été  🙂\n\ttwo",
    "naïve 世界 x",
    "a <s> b",
    "  leading",
    "tail  ",
]
CORPUS = ["the code of amber is 4821. the quiet farmer slept near the garden. hello world été 🙂 naïve x two"] * 40
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(normalizer, decoder, pre_tokenizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁") if pre_tokenizer is None else None
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = list("▁abcdefghijklmnopqrstuvwxyz0123456789.")
    plain = ["".join(char for char in text if char.isascii()) for text in CORPUS]
    tokenizer.train_from_iterator(
        plain,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL + BYTES, initial_alphabet=alphabet, show_progress=False
        ),
    )
    # Bytes are part of the vocabulary, but no added tokens: as in the models' own files.
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoder
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=340,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _llama2() -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    prefix = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(prefix, decoders.Sequence(parts))


def _gemma() -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece(normalizers.Replace(" ", "▁"), decoders.Sequence(parts))


def _metaspace() -> Tokenizer:
    scheme = {"replacement": "▁", "prepend_scheme": "first"}
    return _sentencepiece(None, decoders.Metaspace(**scheme), pre_tokenizers.Metaspace(**scheme))


KINDS = {"byte-level": _byte_level, "llama 2": _llama2, "gemma": _gemma, "metaspace": _metaspace}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedTokenizerFast, Path]:
    made = KINDS[request.param]()
    template = {"single": "<s> $A", "pair": "<s> $A <s> $B", "special_tokens": [("<s>", 1)]}
    made.post_processor = processors.TemplateProcessing(**template)
    folder = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(folder)
    return request.param, wrapped, folder / "tokenizer.json"


def test_ids_are_those_of_python(tokenizer, probe: Probe) -> None:
    kind, python, path = tokenizer
    replies = probe(
        *(("encode", path, hexed(text), starts) for text in TEXTS for starts in (0, 1)), ("encode", path, "", 1)
    )
    if kind == "metaspace":
        # ExecuTorch 1.4.1's reader knows no such pre-tokenizer: refused, not guessed.
        assert [reply.values[0] for reply in replies] == ["bundle"] * len(replies)
        assert "does not know the kind of tokenizer" in replies[0].values[1]
        return
    expected = [python(text, add_special_tokens=starts).input_ids for text in TEXTS for starts in (False, True)]
    assert [reply.tokens() for reply in replies[:-1]] == expected
    assert replies[-1].tokens() == []


def test_pieces_join_to_pythons_text_and_split_no_character(tokenizer, probe: Probe) -> None:
    _, python, path = tokenizer
    encoded = [python(text).input_ids for text in TEXTS]
    for tokens, reply in zip(encoded, probe(*(("detokenize", path, ids(tokens)) for tokens in encoded)), strict=True):
        stream, ours, theirs = TextStream(python), "", ""
        for token, piece in zip(tokens, reply.texts()):  # each is valid UTF-8, or it would not decode
            ours, theirs = ours + piece, theirs + stream.push(token)
            # Nothing that Python could give by now is held back.
            assert ours.startswith(theirs)
        assert "".join(reply.texts()) == python.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "Metaspace", "Metaspace without prefix", "byte level"])
def test_answers_of_drawn_tokens_are_pythons(name: str, tmp_path, probe: Probe) -> None:
    python, draw = TOKENIZERS[name](), random.Random(0)
    python.save_pretrained(tmp_path)
    special = python.convert_ids_to_tokens(len(python) - (1 if name == "byte level" else 2))
    words = ["a", "é", "A", " ", "the", "\n", special, f"{special}a", f"a{special}"]
    cases = []
    for _ in range(150):
        strings = ["".join(draw.choices(words, k=draw.randint(1, 2))) for _ in range(draw.randrange(3))]
        cases.append((draw.random() < 0.5, strings, drawn(draw, python)))
    commands = [
        ("answer", tmp_path / "tokenizer.json", int(continues), " ".join(map(hexed, strings)), ids(tokens))
        for continues, strings, tokens in cases
    ]
    before = python.convert_tokens_to_ids(["a" if "a" in python.get_vocab() else ","])
    for (continues, strings, tokens), reply in zip(cases, probe(*commands), strict=True):
        text, expected = TextPieces(python, stop_strings=strings, after=before if continues else ()), []
        for token in tokens:
            if not text.ended:
                expected.append(text.push(token))
        assert reply.texts() == (expected if text.ended else [*expected, text.finish()]), (strings, tokens)


def test_unknown_decoders_and_files_are_refused(tmp_path, probe: Probe) -> None:
    strange, broken = tmp_path / "strange.json", tmp_path / "broken.json"
    strange.write_text('{"decoder": {"type": "WordPiece", "prefix": "##"}, "model": {"vocab": {}}}')
    broken.write_text('{"decoder": ')
    replies = probe(
        *(("detokenize", path, "1") for path in (strange, broken, tmp_path / "none.json")), ("encode", broken, "61", 0)
    )
    assert [reply.values[0] for reply in replies] == ["bundle"] * 4
    for reply, part in zip(replies, ("type 'WordPiece'", "at byte 12", "cannot read", "does not know"), strict=True):
        assert part in reply.values[1]


def test_utf8_in_any_pieces_is_pythons(probe: Probe) -> None:
    draw = random.Random(0)
    # Halves of characters, overlong forms, surrogates, and what lies past U+10FFFF among whole characters.
    parts = [char.encode() for char in "aé世🙂"] + [
        bytes.fromhex(text)
        for text in ("c3", "e4b8", "f09f99", "80", "ff", "c0af", "eda080", "f4908080", "f8", "e080", "f08080")
    ]
    cases = []
    for _ in range(300):
        data = b"".join(draw.choice(parts) for _ in range(draw.randrange(1, 7)))
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(3))
        cases.append([data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    replies = probe(*(("utf8", *(hexed(piece) for piece in pieces)) for pieces in cases))
    for pieces, reply in zip(cases, replies, strict=True):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        given = [*(decoder.decode(piece) for piece in pieces), decoder.decode(b"", final=True)]
        assert "".join(reply.texts()) == "".join(given)
        for count in range(len(given)):
            assert "".join(reply.texts()[:count]).startswith("".join(given[:count]))


def test_stop_strings_are_pythons(probe: Probe) -> None:
    draw = random.Random(1)
    cases = []
    for _ in range(300):
        strings = ["".join(draw.choice("ab") for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(0, 3))]
        pieces = ["".join(draw.choice("abc") for _ in range(draw.randrange(0, 4))) for _ in range(6)]
        cases.append((strings, pieces))
    commands = [("stops", " ".join(map(hexed, strings)), *map(hexed, pieces)) for strings, pieces in cases]
    for (strings, pieces), reply in zip(cases, probe(*commands), strict=True):
        stops, expected = StopStrings(strings), []
        for piece in pieces:
            expected.append(stops.push(piece))
            if stops.stopped:
                break
        found = reply.values if not stops.stopped else reply.values[:-1]
        assert Reply(True, found).texts() == (expected if stops.stopped else [*expected, stops.finish()])
        assert (reply.values[-1] == "stopped") is stops.stopped


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"key": "a\\u00e9\\ud83d\\ude42\\n\\"\\/"}', "string " + 'aé🙂\n"/'.encode().hex()),
        ('{"key": -9223372036854775808}', "integer -9223372036854775808"),
        ('{"key": 1e3}', "number 1000"),
        ('{"key": 9223372036854775808}', "number 9.22337204e+18"),
        ('{"key": [1, [], {}]}', "array 3"),
        (' {"key" : {"a":null} } ', "object 1"),
        ('{"key": true}', "true"),
        ('{"other": true}', "null"),
    ],
)
def test_json_is_read(probe: Probe, document: str, expected: str) -> None:
    assert probe(("json", hexed(document)))[0].values == [expected]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        # What is under the key is not looked at, but for where it ends.
        ('{"merges": [["a]", "\\"]\\\\"], [[]], {"x": [+]}], "key": [1]}', "array 1"),
        # A piece of a vocabulary is called so.
        ('{"key": 7, "vocab": {"merges": 5, "key": 6}}', "integer 7"),
        ('{"key": {"merges": 5}}', "object 1"),
        ('{"merges": [[1, 2}', None),
        ('{"merges": ["a', None),
        ('{"merges": ["\\', None),
    ],
)
def test_merges_are_passed_over(probe: Probe, document: str, expected: str | None) -> None:
    reply = probe(("json", hexed(document), hexed("merges")))[0]
    assert reply.values == [expected] if expected else "no JSON: at byte" in reply.values[1]


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        '{"a": 1,}',
        "[1 2]",
        '{"a": 1} x',
        '"\\u12"',
        '"\\ud800"',
        '"\n"',
        "01x",
        "nul",
        '{"a": 1, "a": 2}',
        "[" * 70 + "]" * 70,
    ],
)
def test_broken_json_is_refused(probe: Probe, document: str) -> None:
    reply = probe(("json", hexed(document)))[0]
    assert not reply.ok and "no JSON: at byte" in reply.values[1]
