"""The C++ session over an `aoti` bundle, built against the libtorch of the torch wheel."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load
from exportable_cache.backends.aoti.target import TABLE

from ..support.compiling import cmake_compiler
from ..support.models import tiny_model, tokens
from ..support.sessions import AOTI_CAPACITY, aoti_bundle, regional_aoti_bundle, rounded_aoti_bundle
from ..support.store import stored

SOURCE = Path(__file__).parents[2] / "runners" / "aoti"

# In the fast lane the C++ session is the other one, tests/runners; the same bundle is run from Python: test_aoti.py.
pytestmark = [
    pytest.mark.cpp,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake; the test extra installs one"),
]


@pytest.fixture(scope="module", params=["whole", "regions"])
def bundle(request: pytest.FixtureRequest) -> Path:
    if request.param == "regions":
        return regional_aoti_bundle(tiny_model("llama"))
    return aoti_bundle(tiny_model("gemma3_text"))


@pytest.fixture(scope="module")
def rounded_bundle() -> Path:
    """With keys and values in 8 bits."""
    return rounded_aoti_bundle()[1]


@pytest.fixture(scope="module")
def program() -> Path:
    libraries = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    # Its headers are most of the work, and a token takes no time.
    options = [libraries, f"-DCMAKE_CXX_COMPILER={cmake_compiler(20)}", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]

    def build(folder: Path) -> None:
        for command in (
            ["cmake", "-S", str(SOURCE), "-B", str(folder), *options],
            ["cmake", "--build", str(folder)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    return stored({"cpp": "aoti", "options": options}, build) / "generate"


def run(program: Path, *arguments: Any) -> subprocess.CompletedProcess:
    return subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_tokens_and_logits_are_those_of_the_python_session(program: Path, bundle: Path, length: int) -> None:
    prompt = tokens(length, seed=length)
    check(program, bundle, prompt)


@pytest.mark.full
def test_a_cache_in_8_bits(program: Path, rounded_bundle: Path) -> None:
    assert {str(tensor.dtype) for tensor in load(rounded_bundle, trust=True).runner.state.values()} == {
        "torch.int8",
        "torch.float32",
    }
    check(program, rounded_bundle, tokens(9))


def check(program: Path, bundle: Path, prompt: torch.Tensor) -> None:
    """25 greedy tokens after a prompt [1, length], and the logit of each, in C++ and in Python."""
    done = run(program, bundle, 25, *prompt[0].tolist())
    assert done.returncode == 0, done.stderr
    session = load(bundle, trust=True)
    logits = session.prefill(prompt)
    for line in done.stdout.splitlines():
        token, logit = int(line.split()[0]), float(line.split()[1])
        assert token == int(logits.argmax())
        assert logit == pytest.approx(float(logits.max()), abs=1e-4)
        logits = session.decode(torch.tensor([token]))
    assert session.length.tolist() == [prompt.shape[1] + 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (AOTI_CAPACITY - 2, 5, 6, 7, 8),
            f"the cache holds {AOTI_CAPACITY} of at most {AOTI_CAPACITY} tokens, 1 more do not fit",
        ),
        ((1, 5, 128), "token id 128 is outside the vocabulary of 0 to 127"),
        (
            (1, *[5] * (AOTI_CAPACITY + 1)),
            f"the cache holds 0 of at most {AOTI_CAPACITY} tokens, {AOTI_CAPACITY + 1} more do not fit",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    program: Path, bundle: Path, arguments: tuple, message: str
) -> None:
    done = run(program, bundle, *arguments)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sources", [0, 900], r"calls\.1\.sources: there should be a number from 0 to \d+"),
        ("region", 77, r"calls\.1\.region: there should be a number from 0 to \d+"),
        ("results", -1, r"calls\.1\.results: there should be a number from 0 to 10000"),
        ("done", {}, r"calls\.1\.done: there should be a list"),
    ],
)
def test_a_damaged_table_is_refused(program: Path, tmp_path: Path, field: str, value: object, message: str) -> None:
    damaged = shutil.copytree(regional_aoti_bundle(tiny_model("llama")), tmp_path / "bundle")
    table = json.loads((damaged / TABLE).read_text())
    table["methods"]["decode"]["calls"][1][field] = value
    (damaged / TABLE).write_text(json.dumps(table))
    done = run(program, damaged, 1, 5)
    assert done.returncode == 1
    assert re.search(rf"regions\.json is damaged: methods\.decode\.{message}; export the model again", done.stderr)


def test_a_bundle_of_an_earlier_release_is_told(program: Path, tmp_path: Path) -> None:
    earlier = shutil.copytree(regional_aoti_bundle(tiny_model("llama")), tmp_path / "bundle")
    (earlier / TABLE).unlink()
    done = run(program, earlier, 1, 5)
    assert done.returncode == 1
    assert "the bundle was written by an earlier release" in done.stderr and "export the model again" in done.stderr


def test_a_missing_bundle_is_named(program: Path, tmp_path: Path) -> None:
    done = run(program, tmp_path / "none", 1, 5)
    assert done.returncode == 1
    assert "cannot open" in done.stderr and "constants.pt" in done.stderr
