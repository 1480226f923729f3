"""What a bundle shows that is not in it: links, and names of files in the config of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError
from exportable_cache.models.tokenizers import text
from exportable_cache.models.tokenizers.text import check_tokenizer_config


@pytest.mark.parametrize("place", ["tokenizer/more", "tokenizer/more.json", "notes"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_links_are_refused(bundle: Path, tmp_path: Path, place: str, is_folder: bool) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir() if is_folder else target.write_text("{}")
    (bundle / place).symlink_to(target)
    with pytest.raises(BundleError, match="is a link"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab": "vocab.json"},
        {"merges": "/etc/passwd"},
        {"vocab_file": "/etc/passwd"},
        {"tokenizer_file": "../../secret.json"},
        {"extra": {"deep": [{"merges_path": "/etc/passwd"}]}},
    ],
)
def test_names_of_other_files_are_refused(tmp_path: Path, fields: dict) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(BundleError, match="must not name files"):
        check_tokenizer_config(tmp_path)


def test_a_bundle_looks_at_the_config_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before whatever reads the folder first: the tokenizer of text, the whole one, the processor."""
    looked = []
    monkeypatch.setattr(text, "check_tokenizer_config", looked.append)
    opened = Bundle.open(bundle)
    opened.text_tokenizer()
    assert opened.tokenizer() is not None and looked == [bundle / "tokenizer"]


@pytest.mark.parametrize("read", ["text_tokenizer", "tokenizer"])
def test_a_bundle_of_such_a_config_gives_no_tokenizer(bundle: Path, read: str) -> None:
    opened = Bundle.open(bundle)
    (bundle / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"vocab_file": "/etc/passwd"}))
    with pytest.raises(BundleError, match="must not name files"):
        getattr(opened, read)()


def test_a_name_in_the_folder_is_taken(tmp_path: Path) -> None:
    fields = {"vocab_file": "vocab.txt", "name_or_path": "/models/x", "vocab_size": 3, "merges": ["a b"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    check_tokenizer_config(tmp_path)
