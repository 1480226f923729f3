"""Reading text with tokenizer.json alone, where that is what transformers' tokenizer does."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.models.tokenizers.text import TextTokenizer, reads_alike
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


def test_without_a_file_or_with_a_damaged_one(tmp_path: Path) -> None:
    assert not reads_alike(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer.json").write_text("{")
    assert not reads_alike(tmp_path, byte_tokenizer())
    with pytest.raises(InputError, match=r"cannot read .*tokenizer.json: .*; export the model again"):
        TextTokenizer(tmp_path, byte_tokenizer)


def test_a_bundle_says_so_and_its_session_has_transformers_tokenizer_when_it_is_asked_for(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=SIZE)
    tokenizer = byte_tokenizer(chat=True)
    bundle = export(model, "pt2", 64, tmp_path / "out", tokenizer=tokenizer, verify=False)
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
