"""Answers bound by the caller through the C interface: JSON of a schema, and callers that fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="the serve extra is not installed")

from exportable_cache import load

from .conftest import SOURCES, TOLERANCE, with_python_runner
from .test_c_api import PROMPT, shared_library  # noqa: F401  a fixture
from .test_cpp import VOCAB

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
    # Without white space, which a model that knows no JSON goes on with for ever.
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Any:
    return load(demo_bundle)


@pytest.fixture(scope="module")
def called(shared_library: Path, demo_bundle: Path, session: Any) -> dict[str, Any]:  # noqa: F811
    (end_token,) = session.generation_settings.ends
    asked = {"prompt": PROMPT, "vocabulary": VOCAB, "end_token": end_token, "schema": json.dumps(SCHEMA)}
    command = [sys.executable, "-m", f"{__package__}.c_api_constraint", shared_library, demo_bundle, json.dumps(asked)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=SOURCES.parent.parent, env=with_python_runner()
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    # A callback of ctypes that raises writes there, and returns 0.
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_schema_that_the_caller_follows_gives_json(called, session) -> None:
    answers = set()
    for answer in called["answers"]:
        assert answer["outcome"] == [0, ""] and answer["stop"] in (0, 6)
        text = session.text_tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        found = json.loads(text)
        assert list(found) == ["name", "kind", "tags"] and re.fullmatch("[a-z]{1,6}", found["name"])
        assert found["kind"] in ("cat", "dog") and len(found["tags"]) <= 3
        assert answer["calls"] == len(answer["tokens"]) + (answer["stop"] == 6)
        answers.add(text)
    assert len(answers) > 1


def test_a_mask_that_allows_nothing_and_a_caller_that_fails_end_with_a_sentence(called) -> None:
    nothing, failed = "allowed_tokens allows none of 394 tokens after {} new ones", "failed with -7 after {} new tokens"
    for name, sentence in (("nothing", nothing), ("failed", failed)):
        at_once, later = called[f"{name} at once"], called[f"{name} later"]
        for found, count in ((at_once, 0), (later, 3)):
            status, message = found["outcome"]
            assert status == 1 and sentence.format(count) in message, message
            assert found["tokens"] == called["free"]["tokens"][:count]
        assert at_once["held"] == 0 and later["held"] == len(PROMPT) + 2


def test_the_session_goes_on_after_each_end(called, session) -> None:
    assert called["whole"]["outcome"] == [0, ""] and called["whole"]["stop"] == 6
    assert called["whole"]["tokens"] == called["free"]["tokens"][:3] and called["free"]["outcome"] == [0, ""]
    session.reset()
    assert called["free"]["tokens"] == list(session.generate(torch.tensor([PROMPT]), 4))
    expected = torch.tensor(called["next"]["logits"])
    for name in ("nothing later", "failed later", "whole"):
        logits = torch.tensor(called[f"after {name}"]["logits"])
        assert (logits - expected).abs().max() <= TOLERANCE


def test_greedy_takes_the_likeliest_of_what_is_allowed(called, session) -> None:
    session.reset()
    likely = session.prefill(torch.tensor([PROMPT]))[0].topk(2).indices.tolist()
    assert called["free"]["tokens"][0] == likely[0] and called["others"]["tokens"] == likely[1:]
