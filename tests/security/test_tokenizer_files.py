"""What lies under tokenizer/: listed, or refused; no code of its own; nobody is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exportable_cache import load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, InputError
from exportable_cache.models.loading.tokenizer import load_tokenizer

from .conftest import reseal


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer/added_tokens.json",
        "tokenizer/another.jinja",
        "tokenizer/additional_chat_templates/tool_use.jinja",
        "tokenizer/tokenization_evil.py",
        "constants.pt",
        "other.pte",
    ],
)
def test_files_that_nobody_has_checked_are_refused(bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("{}")
    with pytest.raises(BundleError, match=f"{Path(name).name} would be read, but the manifest does not list it"):
        load(bundle)


def test_other_files_do_no_harm(bundle: Path) -> None:
    (bundle / "README.md").write_text("copied by hand")
    assert Bundle.open(bundle)


def _with_code(folder: Path, marker: Path) -> None:
    (folder / "tokenization_evil.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\n"
        "from transformers import PreTrainedTokenizerFast\nclass Evil(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    fields["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    fields["tokenizer_class"] = "Evil"
    path.write_text(json.dumps(fields))


def test_code_of_a_tokenizer_is_neither_run_nor_asked_about(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    marker = tmp_path / "marker"
    _with_code(bundle / "tokenizer", marker)
    path = bundle / "manifest.json"
    fields = json.loads(path.read_text())
    fields["files"]["tokenizer/tokenization_evil.py"] = {"sha256": "", "bytes": 0, "holds": "tokenizer"}
    path.write_text(json.dumps(fields))
    reseal(bundle)
    try:
        load(bundle)
    except (BundleError, InputError) as error:
        assert "cannot read the tokenizer" in str(error)
    assert not marker.exists()
    try:
        load_tokenizer(bundle / "tokenizer")
    except InputError:
        pass
    assert not marker.exists()
