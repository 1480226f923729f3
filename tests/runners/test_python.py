"""The Python runner over the C interface: it answers as the session does, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load
from exportable_cache.backends.executorch.native.build import STAMP, build_native, missing_tools
from exportable_cache_runner.installed import release_folder

from ..support.distributions import SETTINGS, check_draws, expected_probabilities
from ..support.store import REPOSITORY
from .conftest import SOURCES, TOLERANCE, with_python_runner
from .test_c_api import PROMPT, QUESTION, shared_library  # noqa: F401  a fixture
from .test_cpp import CAPACITY
from .test_cpp_settings import with_settings

RUNNER = SOURCES.parent / "python"


@pytest.fixture(scope="module")
def session(demo_bundle: Path) -> Any:
    return load(demo_bundle)


@pytest.fixture(scope="module")
def called(shared_library: Path, demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    import _ctypes

    asked = json.dumps({"prompt": PROMPT, "question": QUESTION, "another": _ctypes.__file__})
    folder = tmp_path_factory.mktemp("python")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("python_calls.py"), shared_library, demo_bundle, folder, asked],
        capture_output=True, text=True, timeout=120, env=with_python_runner(),
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    # A callback of ctypes that raises writes there, and returns 0.
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_its_readme_runs(shared_library: Path, demo_bundle: Path, tmp_path: Path) -> None:  # noqa: F811
    (code,) = re.findall(r"^```python\n(.*?)^```", (RUNNER / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "demo").symlink_to(demo_bundle)
    variables = with_python_runner() | {"EXPORTABLE_CACHE_RUNNER": str(shared_library)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert done.returncode == 0 and done.stdout == " 4821.", done.stderr[-3000:]


def test_it_answers_as_the_session(called, session) -> None:
    assert called["loaded"] == []
    session.reset()
    logits = session.prefill(torch.tensor([PROMPT]))[0]
    assert (torch.tensor(called["prefill"]) - logits).abs().max() <= TOLERANCE
    assert called["length"] == [40, CAPACITY] and called["after rewind"] == 40
    logits = session.decode(torch.tensor([7]))[0]
    assert (torch.tensor(called["next"]) - logits).abs().max() <= TOLERANCE
    assert called["next of other"] == called["next"]
    session.reset()
    tokens = list(session.generate(torch.tensor([PROMPT]), 8))
    stop = "MAX_NEW_TOKENS" if len(tokens) == 8 else "END_TOKEN"
    assert called["generate"] == [tokens, tokens, len(PROMPT), len(tokens), stop]
    assert called["callback"] == [tokens[:1], len(PROMPT), 1, "CALLBACK"]
    session.reset()
    text = "".join(session.generate_text(QUESTION))
    assert called["text"][:2] == [text, text] and called["text"][2] > 1 and called["chat"] == text
    stop, stopped = called["stopped"]
    assert stop and stopped == text.partition(stop)[0]
    first, second = called["drawn"]
    assert first == second != tokens
    encode = session.text_tokenizer
    assert called["tokens"] == [encode(QUESTION)["input_ids"], encode("a", add_special_tokens=False)["input_ids"]] + [
        encode(QUESTION)["input_ids"]
    ]


def test_log_probabilities_are_the_sessions(called, session) -> None:
    session.reset()
    logits = session.prefill(torch.tensor([PROMPT]))
    for token, (logprob, alternatives) in zip(called["generate"][0], called["likely"], strict=False):
        expected = logits[0].log_softmax(dim=-1)
        values, best = expected.topk(2)
        assert [one for one, _ in alternatives] == best.tolist()
        assert [logprob, *(value for _, value in alternatives)] == pytest.approx(
            [float(expected[token]), *values.tolist()], abs=TOLERANCE
        )
        logits = session.decode(torch.tensor([token]))
    assert len(called["likely"]) == 3
    assert called["failing logprobs"] == ["IndexError", "tuple index out of range"]


def test_what_is_cached_of_a_prompt_is_not_fed_again(called) -> None:
    tokens, _, _, count, stop = called["generate"]
    assert called["cached"] == [tokens, 5, count, stop, len(PROMPT) + count - 1]
    # Rules read the whole prompt.
    whole, rest = called["penalised"]
    assert whole == rest != tokens


def test_draws_follow_the_distribution_of_transformers(
    shared_library: Path,  # noqa: F811
    demo_bundle: Path,
    session: Any,
    tmp_path: Path,
) -> None:
    settings = SETTINGS[1] | {"temperature": 6.0, "repetition_penalty": 1.1}
    folder = with_settings(demo_bundle, tmp_path / "sampling", {"do_sample": True, **settings})
    prompt = PROMPT[:8]
    code = (
        "import json\n"
        "from exportable_cache_runner import Options, Session\n"
        f"prompt, session = {prompt}, Session({str(folder)!r}, {str(shared_library)!r})\n"
        "session.prefill(prompt)\n"
        "def draw(seed):\n"
        "    held = Options(max_new_tokens=1, seed=seed, from_checkpoint=True, cached_tokens=len(prompt) - 1)\n"
        "    return session.generate(prompt, held)[0][0]\n"
        "print(json.dumps([draw(seed) for seed in range(10_000)]))\n"
    )
    environment = with_python_runner()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    session.reset()
    logits = session.prefill(torch.tensor([prompt]))
    expected = expected_probabilities(torch.tensor([prompt]), logits, settings)
    check_draws(torch.tensor(json.loads(done.stdout)), expected)


def test_the_library_is_given_every_option(called, session) -> None:
    asked, given, defaults = called["options"]
    assert given == {**asked, "has_seed": 1}
    nothing = {"stop_tokens": [], "stop_strings": [], "top_p": 1.0}
    assert defaults == {**dict.fromkeys(given, 0), **nothing}
    assert called["starts"] == [1, 0]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": QUESTION}]
    assert called["system"] == len(
        session.text_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def test_the_caller_bounds_answers(called) -> None:
    last = len(called["prefill"]) - 1
    assert called["only"] == [[last] * 3, len(PROMPT), 3, "WHOLE"]
    assert called["none"][0] == "INPUT" and "allows none of" in called["none"][1]
    assert called["fails"] == ["IndexError", "array index out of range"]


def test_another_thread_can_only_cancel(called) -> None:
    first = called["generate"][0][:1]
    assert called["cancelled"] == [first, len(PROMPT), 1, "CANCELLED"]
    assert [kind for kind, _ in called["seen"]] == ["INPUT"] and "in use" in called["seen"][0][1]


def test_what_is_refused_has_a_kind_and_a_sentence(called) -> None:
    expected = {
        "no bundle": ("BUNDLE", "manifest.json"),
        "no library": ("RUNTIME", "EXPORTABLE_CACHE_RUNNER"),
        "another library": ("RUNTIME", "ec_abi_version"),
        "threads": ("INPUT", "threads is 3, but sessions of this process are open that compute in 1;"),
        "many threads": ("INPUT", "threads is 513; it must be from 1 to 512"),
        "no threads": ("INPUT", "threads is -1; it must be from 1 to 512"),
        "more than 64 bits": ("INPUT", f"threads must be an integer of 64 bits, got {2**64 + 1}"),
        "an id": ("INPUT", "outside the vocabulary"),
        "a large id": ("INPUT", "tokens[1] is 9223372036854775808"),
        "no tokens": ("INPUT", "empty"),
        "no room": ("CACHE_FULL", f"at most {CAPACITY} tokens"),
        "zero": ("INPUT", "zero byte at 1"),
        "half": ("INPUT", "half of a character at 1"),
        "new": ("INPUT", "max_new_tokens must be from 1 to"),
        "seed": ("INPUT", "seed must be from 0 to"),
        "stop": ("INPUT", "stop_tokens must be from 0 to"),
        "cached": ("INPUT", "cached_tokens is 1; it must be from 0 to 0: the cache holds 0 tokens"),
        "cached whole": ("INPUT", "cached_tokens is 40; it must be from 0 to 39: the cache holds 40 tokens"),
        "alternatives": ("INPUT", "alternatives must be from 0 to"),
        "top_p": ("INPUT", "top_p"),
        "no encoder": ("INPUT", "this model has no encoder"),
        "no speech": ("INPUT", "this model has no encoder"),
        "an input": ("INPUT", "takes token ids only, got pixel_values"),
        "no array": ("INPUT", "pixel_values is a float"),
        "doubles": ("INPUT", "pixel_values is an array of 'd'"),
        "inside": ("INPUT", "in use"),
        "interrupted": ("KeyboardInterrupt", "from the callback"),
    }
    assert called["refused"].keys() == expected.keys()
    for name, (kind, said) in expected.items():
        assert called["refused"][name][0] == kind and said in called["refused"][name][1], (
            name,
            called["refused"][name],
        )
    assert called["after refusals"] == called["prefill"]
    assert called["closed"][0] == "INPUT" and "closed" in called["closed"][1]
    kind, said = called["another interface"]
    assert kind == "RUNTIME" and "version 1 of the C interface, and this module needs 2" in said
    assert called["beside the bindings"][0] == "RUNTIME" and "another process" in called["beside the bindings"][1]


@pytest.mark.cpp
def test_the_native_package_is_found_where_it_is_installed(demo_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    if missing := missing_tools():
        pytest.skip(f"the native package needs {missing}")
    folder = tmp_path / release_folder()
    package = build_native(output=folder, options=["-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"])
    assert package.is_new and {path.name for path in folder.iterdir()} == {
        package.kernels.name,
        package.runner.name,
        STAMP,
    }
    code = "import sys, exportable_cache_runner as runner; print(runner.Session(sys.argv[1]).max_length)"
    variables = {name: value for name, value in os.environ.items() if name != "EXPORTABLE_CACHE_RUNNER"}
    # Before the environment's own.
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", code, demo_bundle], capture_output=True, text=True, timeout=120, env=variables
    )
    assert done.returncode == 0 and done.stdout.split() == [str(CAPACITY)], done.stderr[-3000:]
