"""One bundle for a backend that needs no package, and a copy of it to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export
from exportable_cache.backends import TARGETS

from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support import fake_target
from ..support.models import tiny_model
from .editing import CAPACITY


@pytest.fixture(scope="module", autouse=True)
def fake(fake_backend: None) -> None:
    """Every file here opens bundles for it."""


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model("gemma3_text", vocab_size=SIZE, eos_token_id=SIZE - 1)


@pytest.fixture(scope="session")
def original(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "fake", fake_target.ENTRY)
        export(model, "fake", CAPACITY, path, prefill_chunk=13, tokenizer=byte_tokenizer(chat=True))
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))
