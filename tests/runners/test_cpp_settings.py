"""A checkpoint's generation config in C++: the tokens are those of the Python session under the same settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import Session, load

from .conftest import Probe, ids
from .test_cpp import prompt_of

LENGTH = 20
PROMPT = prompt_of(9, seed=3)


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Session:
    return load(demo_bundle)


def answer(session: Session, settings: dict[str, Any], limit: int | None = LENGTH) -> list[int]:
    """Greedy tokens in Python."""
    kept = session.generation_config
    session.generation_config = type(kept).from_dict({**kept.to_dict(), **settings})
    try:
        session.reset()
        return list(session.generate(torch.tensor([PROMPT]), limit))
    finally:
        session.generation_config = kept


def with_settings(bundle: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """The same bundle under another generation config."""
    folder.mkdir()
    for path in bundle.iterdir():
        if path.name != "manifest.json":
            (folder / path.name).symlink_to(path)
    fields = json.loads((bundle / "manifest.json").read_text())
    fields["generation_config"].update(settings)
    (folder / "manifest.json").write_text(json.dumps(fields))
    return folder


def settings_of(plain: list[int]) -> list[dict[str, Any]]:
    """Settings alone and together, made for the tokens that come without any."""
    alone = [
        {"suppress_tokens": [plain[1], 5000]},
        {"begin_suppress_tokens": [plain[0]]},
        {"bad_words_ids": [[plain[0], plain[1]], [plain[2]]]},
        {"sequence_bias": [[[plain[1]], -20.0], [[plain[0], 77], 30]]},
        {"repetition_penalty": 3},
        {"encoder_repetition_penalty": 4.0},
        {"no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 4.0},
        {"min_length": 20, "eos_token_id": plain[1]},
        {"min_new_tokens": 6, "eos_token_id": plain[1]},
        {"forced_eos_token_id": 5},
        {"exponential_decay_length_penalty": [2, 1.6], "eos_token_id": 7},
        {"max_new_tokens": 3},
        {"max_length": 15, "forced_eos_token_id": [5, 6]},
    ]
    together = {name: value for one in alone for name, value in one.items()} | {"remove_invalid_values": True}
    return [*alone, together | {"eos_token_id": [1, 7], "no_repeat_ngram_size": 2, "sequence_bias": [[[77], 2.5]]}]


def test_tokens_are_those_of_the_session(demo_bundle: Path, session: Session, probe: Probe, tmp_path: Path) -> None:
    plain = answer(session, {"min_new_tokens": LENGTH})
    assert len(set(plain[:3])) == 3
    commands: list[tuple[object, ...]] = []
    expected = []
    for index, settings in enumerate(settings_of(plain)):
        settings = {"min_new_tokens": LENGTH, **settings} if "min_length" not in settings else settings
        folder = with_settings(demo_bundle, tmp_path / str(index), settings)
        has_limit = "max_new_tokens" in settings or "max_length" in settings
        limit = () if has_limit else (f"max_new_tokens={LENGTH}",)
        commands += [("open", folder), ("generate", ids(PROMPT), *limit)]
        expected.append(answer(session, settings, None if has_limit else LENGTH))
    replies = probe(*commands)[1::2]
    assert [reply.tokens() for reply in replies] == expected
