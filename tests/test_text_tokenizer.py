"""Reading text with tokenizer.json alone, where that is what transformers' tokenizer does."""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.generation.text import encode_ids
from exportable_cache.models.tokenizers.text import LONG_TEXT, TextTokenizer, encoded, most_characters, reads_alike
from tests.decoding.byte_tokenizer import END, SIZE, byte_tokenizer
from tests.support.models import tiny_model


class Adding(PreTrainedTokenizerFast):
    """Puts a token before text that its file knows nothing of."""

    def _encode_plus(self, *texts, **options):
        found = super()._encode_plus(*texts, **options)
        found["input_ids"] = [0, *found["input_ids"]]
        return found


class Shouting(PreTrainedTokenizerFast):
    """Changes text that its file gives."""

    def _decode(self, *tokens, **options):
        return super()._decode(*tokens, **options).upper()


def saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def test_text_goes_through_the_file_alone_as_through_the_tokenizer(tmp_path: Path) -> None:
    whole = byte_tokenizer(chat=True)
    folder = saved(whole, tmp_path / "tokenizer")
    # As a file saved amid training is.
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.enable_padding(length=64)
    file.enable_truncation(4)
    file.save(str(folder / "tokenizer.json"))
    assert reads_alike(folder, whole)

    def unused() -> PreTrainedTokenizerBase:
        raise AssertionError("transformers' tokenizer was made")

    alone = TextTokenizer(folder, unused)
    text = f"Two  caf\u00e9s{END} \u4f60\u597d"
    ids = alone(text)["input_ids"]
    assert ids == whole(text)["input_ids"] and len(ids) > 10
    assert alone.decode(ids, skip_special_tokens=True) == text.replace(END, "")
    # What is no plain text is asked of transformers'.
    assert TextTokenizer(folder, lambda: whole).chat_template == whole.chat_template


@pytest.mark.parametrize("kind", [Adding, Shouting])
def test_a_tokenizer_that_does_more_than_its_file_is_kept_whole(tmp_path: Path, kind: type) -> None:
    tokenizer = kind(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token=END)
    assert not reads_alike(saved(tokenizer, tmp_path), tokenizer)


def test_a_long_text_is_encoded_without_pythons_lock_to_the_same_ids() -> None:
    backend = byte_tokenizer().backend_tokenizer
    text = "the \u00e9 code " * (LONG_TEXT // 10)

    class Batches:
        """A tokenizer whose `encode`, which holds the lock, fails."""

        encode_batch, encode_batch_fast = backend.encode_batch, backend.encode_batch_fast

    for adds in (True, False):
        expected = backend.encode(text, add_special_tokens=adds)
        assert encoded(Batches(), text, add_special_tokens=adds).ids == expected.ids  # type: ignore[arg-type]
    assert encoded(Batches(), text, offsets=True).offsets == expected.offsets  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        encoded(Batches(), "short")  # type: ignore[arg-type]


def _backend(vocab: dict[str, int] | None = None, **parts: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, a token of 5 characters, and the given parts."""
    known = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=known | {"abcde": 256} if vocab is None else vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("tokenizer", "most"),
    [
        (_backend(), 5),
        (_backend(normalizer=normalizers.NFC()), 20),
        (_backend(normalizer=normalizers.Replace("ab", "x")), None),
        (_backend(normalizer=normalizers.Replace(Regex("a+"), "x")), None),
        (_backend(normalizer=normalizers.Sequence([normalizers.Replace(" ", "_"), normalizers.Prepend("_")])), 5),
        (_backend(normalizer=normalizers.Strip()), None),
        (_backend({"a": 0, "abcde": 1}), None),
        (
            _backend(
                {f"<0x{byte:02X}>": byte for byte in range(256)},
                pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
            ),
            6,
        ),
        (_backend(pre_tokenizer=pre_tokenizers.Split(" ", "removed")), None),
    ],
)
def test_the_most_characters_of_a_token(tokenizer: PreTrainedTokenizerFast, most: int | None) -> None:
    """There is no limit where a tokenizer drops characters, or makes one unknown token of many."""
    assert most_characters(tokenizer) == most
    if most is not None:
        tokenizer.add_tokens([AddedToken("<x>", rstrip=True)])
        assert most_characters(tokenizer) is None


def test_without_a_file_or_with_a_damaged_one(tmp_path: Path) -> None:
    assert not reads_alike(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{")
    assert not reads_alike(tmp_path, byte_tokenizer())
    with pytest.raises(InputError, match=r"cannot read .*tokenizer.json: .*; export the model again"):
        TextTokenizer(tmp_path, byte_tokenizer)


@pytest.mark.usefixtures("fake_backend")
def test_a_bundle_says_so_and_its_session_has_transformers_tokenizer_when_it_is_asked_for(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=SIZE)
    tokenizer = byte_tokenizer(chat=True)
    bundle = export(model, "fake", 64, tmp_path / "out", tokenizer=tokenizer, verify=False)
    assert bundle.manifest.files["tokenizer/tokenizer.json"].details == {"reads_alike": True}
    session = load(tmp_path / "out")
    text = "".join(session.stream_text("hello", 6))
    assert isinstance(session.text_tokenizer, TextTokenizer)
    assert isinstance(session.tokenizer, PreTrainedTokenizerBase)
    assert session.text_tokenizer is session.tokenizer
    session.reset()
    assert "".join(session.stream_text("hello", 6)) == text
    # Chat messages need the template.
    fresh = load(tmp_path / "out")
    messages = [{"role": "user", "content": "hi"}]
    assert "".join(fresh.stream_text(messages, 4)) == "".join(load(tmp_path / "out").stream_text("[user]hi>", 4))
    other = byte_tokenizer()
    fresh.tokenizer = other
    assert fresh.tokenizer is other is fresh.text_tokenizer


def test_texts_past_the_limit_of_the_tokenizer_are_encoded_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Check prompts and messages, because the limit is that of the cache, and of it an error speaks."""
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 4
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for prompt in ("a long text", [{"role": "user", "content": "a long text"}]):
        for split in (False, True):
            tokenizer.deprecation_warnings.clear()
            with mock.patch.object(logging.getLogger("transformers"), "propagate", True):
                assert len(encode_ids(tokenizer, prompt, split_special_tokens=split)) > 4
    assert "longer than the specified maximum" not in caplog.text
