"""The C interface, called as from another language."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load
from exportable_cache.demo.task import make_questions

from .conftest import SOURCES, TOLERANCE, with_python_runner
from .test_cpp import CAPACITY, prompt_of

HEADER = SOURCES / "include" / "exportable_cache.h"
PROMPT = prompt_of(40, seed=1)
QUESTION = make_questions(1, seed=77, min_distance=16, tokens=(60, 250))[0].prompt


@pytest.fixture(scope="module")
def shared_library(request: pytest.FixtureRequest, cpp_build: Path) -> Path:
    if request.config.getoption("--toolchain") is not None:
        pytest.skip("a library of another processor cannot be loaded here")
    if request.config.getoption("--sanitize"):
        pytest.skip("sanitizers have to be there before the library, in a process that is not theirs")
    return cpp_build / "libexportable_cache.so"


@pytest.fixture(scope="module")
def called(shared_library: Path, demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = json.dumps({"prompt": PROMPT, "question": QUESTION, "stop": "2"})
    script = Path(__file__).with_name("c_api_calls.py")
    command = [sys.executable, script, shared_library, demo_bundle, tmp_path_factory.mktemp("c"), asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=with_python_runner())
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Any:
    return load(demo_bundle)


def test_it_answers_as_the_session_in_python(called, session) -> None:
    assert called["open"] == called["save"] == called["load"] == [0, ""] == [0, called["no error"]]
    session.reset()
    logits = session.prefill(torch.tensor([PROMPT]))[0]
    assert (torch.tensor(called["prefill"]["logits"]) - logits).abs().max() <= TOLERANCE
    assert called["length"] == [40, CAPACITY]
    logits = session.decode(torch.tensor([7]))[0]
    assert (torch.tensor(called["next"]["logits"]) - logits).abs().max() <= TOLERANCE
    assert called["next of other"] == called["next"]
    assert called["rewind"] == [[0, ""], [40, CAPACITY]]
    session.reset()
    tokens = list(session.generate(torch.tensor([PROMPT]), 8))
    assert called["generate"]["tokens"] == tokens and called["generate"]["counted"] == [40, len(tokens)]
    session.reset()
    text = "".join(session.generate_text(QUESTION))
    assert called["text"]["text"] == called["chat"]["text"] == text
    assert called["encode"][0] == [0, ""] and called["encode"][2] > 3
    assert called["encode"][1] == session.text_tokenizer(QUESTION, add_special_tokens=True)["input_ids"][:3]


def test_threads_are_set_before_sessions_open(called) -> None:
    (one, started), (three, then), (again, back) = called["threads"]
    assert one[0] == three[0] == again[0] == 0
    assert (then - started, back) == (2, started)
    assert called["the same threads"][0] == 0


def test_options_of_any_version_are_taken(called) -> None:
    tokens = called["generate"]["tokens"][:3]
    assert called["without options"]["tokens"] == called["later options"]["tokens"] == tokens
    assert called["without options"]["stop"] == 4
    status, message = called["unknown options"]["outcome"]
    assert status == 1 and "does not know" in message
    assert (
        called["text"]["text"].startswith(called["stopped text"]["text"]) and "2" not in called["stopped text"]["text"]
    )
    first, second = called["drawn"]
    assert first == second != called["generate"]["tokens"]


def test_another_thread_cancels(called) -> None:
    assert called["cancelled"] == [[0, ""], 5, called["generate"]["tokens"][:3]]


def test_what_is_refused_has_a_code_and_a_sentence(called) -> None:
    expected = [
        (3, "manifest.json"),
        (1, "outside the vocabulary"),
        (2, f"at most {CAPACITY} tokens"),
        (1, "max_new_tokens is -1"),
        (1, "top_p"),
        (1, "ec_options_init"),
        (1, "session is null"),
        (1, "tokens is null"),
        (1, "path is null"),
        (1, "this model has no encoder"),
        (1, "values is null"),
        (1, "tokens is null"),
        (1, "takes token ids only, got pixel_values"),
        (1, "shape[1] is 0"),
        (1, "shape[1] is 4611686018427387904"),
        (1, "dtype must be EC_FLOAT32 or EC_INT64, got 7"),
        (1, "data is null"),
        (1, "threads is 0; it must be from 1 to 512"),
        (1, "threads is 513; it must be from 1 to 512"),
        (1, "threads is 3, but sessions of this process are open that compute in 1"),
    ]
    for (status, message), (code, said) in zip(called["refused"], expected, strict=True):
        assert status == code and said in message, (status, message)
    assert called["after refusals"]["logits"] == called["prefill"]["logits"]


def test_the_header_is_c_and_says_what_the_library_has(shared_library: Path, called) -> None:
    header = HEADER.read_text()
    declared = set(re.findall(r"^EC_API [\w* ]+?\*?(ec_\w+)\(", header, re.MULTILINE))
    exported = subprocess.run(["nm", "-D", "--defined-only", shared_library], capture_output=True, text=True).stdout
    assert declared == {line.split()[-1] for line in exported.splitlines() if line.split()[-1].startswith("ec_")}
    assert len(declared) == 26
    assert called["abi"] == int(re.search(r"EC_ABI_VERSION (0x\w+)u", header)[1], 16)
    checks = "\n".join(f'_Static_assert(sizeof({name}) == {size}, "{name}");' for name, size in called["sizes"].items())
    strict = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    done = subprocess.run(
        ["cc", *strict, "-fsyntax-only", f"-I{HEADER.parent}", "-xc", "-"],
        input=f"#include <exportable_cache.h>\n{checks}\n", text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
