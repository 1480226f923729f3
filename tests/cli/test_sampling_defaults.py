"""Commands sample as the checkpoint's generation config says, say so, and let options and requests override it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.generation.sampling_options import SamplingOptions

from .bundles import edit_manifest

pytestmark = pytest.mark.usefixtures("fake_backend")

PROMPT = "the code of amber is 4821. amber?"
#: Settings of the checkpoint, and the options of `generate` that ask for the same.
CONFIG = {"do_sample": True, "temperature": 5.0, "top_k": 40, "top_p": 0.99, "repetition_penalty": 1.5}
SAME = ("--temperature", 5, "--top-k", 40, "--top-p", 0.99, "--repetition-penalty", 1.5)
LIMIT = ("--max-new-tokens", 9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, fake_backend: None) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "demo"
    return export("demo", "fake", 128, folder, prefill_chunk=16, verify=False).path


@pytest.fixture(scope="module")
def sampling(plain: Path) -> Path:
    folder = shutil.copytree(plain, plain.with_name("sampling"))
    fields = json.loads((plain / "manifest.json").read_text())["generation_config"]
    edit_manifest(folder, generation_config={**fields, **CONFIG, "num_beams": 3, "chat_format": "x"})
    return folder


def test_generate_samples_as_the_checkpoint_says(run: Any, plain: Path, sampling: Path) -> None:
    prompt = ("-p", PROMPT, *LIMIT)
    expected = run("generate", plain, *prompt, *SAME, "--seed", 4)
    found = run("generate", sampling, *prompt, "--seed", 4)
    greedy = run("generate", plain, *prompt, "--repetition-penalty", 1.5)
    assert found.exit_code == 0 and found.stdout == expected.stdout != greedy.stdout, found.stderr
    asked = "temperature 5.0, top_k 40, top_p 0.99, repetition_penalty 1.5"
    assert (
        f"sampling, seed 4, max_new_tokens 9; from generation_config: {asked}; --greedy takes the most likely token"
        in found.stderr
    )
    assert "asks for num_beams=3, which is not followed" in found.stderr
    assert "has settings that transformers' GenerationConfig has not: chat_format" in found.stderr
    for option in (("--greedy",), ("--temperature", 0)):
        found = run("generate", sampling, *prompt, *option)
        assert found.stdout == greedy.stdout and "greedy, max_new_tokens 9; from generation_config: rep" in found.stderr
    found = run("generate", sampling, *prompt, "--seed", 4, "--top-k", 0, "--temperature", 3, "--json")
    settings = json.loads(found.stdout)["settings"]
    assert settings == {
        "temperature": 3.0, "top_k": None, "top_p": 0.99, "min_p": None, "repetition_penalty": 1.5, "seed": 4,
        "max_new_tokens": 9, "max_length": None,
    }  # fmt: skip
    assert "sampling, temperature 3.0, seed 4, max_new_tokens 9; from generation_config: top_p 0.99" in found.stderr


def test_a_constrained_text_is_sampled_too(run: Any, plain: Path, sampling: Path) -> None:
    pytest.importorskip("llguidance")
    pattern = ("-p", PROMPT, "--regex", "[a-z0-9]{9}", "--seed", 4)
    found, expected = run("generate", sampling, *pattern), run("generate", plain, *pattern, *SAME)
    assert found.stdout == expected.stdout != run("generate", plain, *pattern).stdout


def test_nothing_is_printed_for_greedy_choice_without_settings(run: Any, plain: Path) -> None:
    done = run("generate", plain, "-p", PROMPT, *LIMIT)
    assert done.exit_code == 0 and "greedy" not in done.stderr


def test_chat_samples_as_the_checkpoint_says(run: Any, plain: Path, sampling: Path) -> None:
    found = run("chat", sampling, *LIMIT, "--seed", 4, input=f"{PROMPT}\n")
    expected = run("chat", plain, *LIMIT, *SAME, "--seed", 4, input=f"{PROMPT}\n")
    assert found.exit_code == 0 and found.stdout == expected.stdout, found.stderr
    assert "from generation_config: temperature 5.0" in found.stderr
    greedy = run("chat", sampling, *LIMIT, "--greedy", input=f"{PROMPT}\n")
    assert greedy.stdout == run("chat", plain, *LIMIT, "--repetition-penalty", 1.5, input=f"{PROMPT}\n").stdout
    assert greedy.stdout != found.stdout


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_options_that_exclude_each_other_are_refused(run: Any, sampling: Path, command: str) -> None:
    prompt = ("-p", PROMPT) if command == "generate" else ()
    result = run(command, sampling, *prompt, "--greedy", "--temperature", 1)
    assert result.exit_code == 2 and "cannot be combined with --temperature" in result.stderr
    result = run(command, sampling, *prompt, "--greedy", "--top-p", 0.5)
    assert result.exit_code == 2 and "temperature must be above 0 with top_p=0.5" in result.stderr


def test_requests_have_the_defaults_of_the_checkpoint_and_override_them() -> None:
    pytest.importorskip("fastapi")
    from exportable_cache.cli.server.schema import DEFAULT_SAMPLING, CompletionRequest

    def sampled(default: SamplingOptions, **fields: Any) -> SamplingOptions:
        return CompletionRequest(model="m", prompt="x", **fields).options(default).sampling

    default = SamplingOptions(0.7, 20, 0.8, repetition_penalty=1.2)
    assert sampled(default) == default and sampled(DEFAULT_SAMPLING) == SamplingOptions(1.0)
    assert sampled(default, temperature=0.2, seed=3) == SamplingOptions(0.2, 20, 0.8, None, 1.2, 3)
    assert sampled(default, top_k=-1, top_p=1, min_p=0.1) == SamplingOptions(0.7, None, None, 0.1, 1.2)
    assert sampled(default, temperature=0, top_p=0.5) == SamplingOptions(repetition_penalty=1.2)
    assert sampled(SamplingOptions(), top_p=0.5) == SamplingOptions()
    assert sampled(SamplingOptions(), temperature=1, top_p=0.5) == SamplingOptions(1.0, top_p=0.5)
    with pytest.raises(InputError, match="top_p must be above 0"):
        sampled(SamplingOptions(), top_p=3)


def test_a_server_completes_as_the_checkpoint_says(
    run: Any, sampling: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from exportable_cache.cli.server import app

    served: list[Any] = []
    monkeypatch.setattr(app, "run", lambda made, *rest: served.append(made))
    monkeypatch.setattr(app, "make_app", lambda completer, options: options)
    lines = [run("serve", *arguments).stderr for arguments in ((sampling,), (plain,), (plain, "--greedy"))]
    assert [options.sampling for options in served] == [
        SamplingOptions(5.0, 40, 0.99), SamplingOptions(1.0), SamplingOptions(),
    ]  # fmt: skip
    assert "from generation_config: temperature 5.0" in lines[0]
    assert "sampling, temperature 1.0; --greedy takes" in lines[1] and "greedy" not in lines[2]
    assert load(sampling).generation_settings.sampling == SamplingOptions(5.0, 40, 0.99)


def test_an_application_without_options_asks_the_checkpoint(sampling: Path, plain: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from .serving import client_of, served

    def completed(bundle: Path, *bodies: dict[str, Any]) -> list[str]:
        asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 9, "seed": 4}
        with served(load(bundle)) as address:
            create = client_of(address).completions.create
            return [create(**asked, extra_body=body).choices[0].text for body in bodies]

    same = {"temperature": 5, "top_k": 40, "top_p": 0.99, "repetition_penalty": 1.5}
    expected, greedy = completed(plain, same, {"temperature": 0, "repetition_penalty": 1.5})
    assert completed(sampling, {}, {"temperature": 0}) == [expected, greedy] and expected != greedy
