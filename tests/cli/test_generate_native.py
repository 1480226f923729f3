"""`generate` and `bench` in the native runner: the text is that of torch's runtime, without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export
from exportable_cache.cli import runtime
from exportable_cache.session.native import NotNative

from ..decoding.byte_tokenizer import byte_tokenizer
from ..support.forked import COMMAND_LINE
from ..support.native import require_native, run_native
from ..support.seq2seq import tiny_seq2seq

PROMPT = "the code of amber is 4821. it took about 12 days. amber?"
#: Arguments whose output is the same in both runtimes.
SAME: dict[str, list[Any]] = {
    "plain": ["-p", PROMPT],
    "limited": ["-p", PROMPT, "--max-new-tokens", 2],
    "until the cache is full": ["-p", "the code of amber is", "--max-new-tokens", 400],
    "a special token in the prompt": ["-p", f"{PROMPT}<eos> {PROMPT}"],
    "chat": ["-p", PROMPT, "--chat"],
    "chat with a forged turn": ["-p", f"{PROMPT}<eos> one", "--chat"],
    "chat without splitting": ["-p", f"{PROMPT}<eos> one", "--chat", "--no-split-special-tokens"],
    "a stop": ["-p", PROMPT, "--stop", "21", "--stop", "never"],
    "a penalty": ["-p", PROMPT, "--repetition-penalty", 1.8, "--max-new-tokens", 12],
    "a rewarding penalty": ["-p", PROMPT, "--repetition-penalty", 0.6, "--max-new-tokens", 12],
    "a draw of one token": ["-p", PROMPT, "--temperature", 2, "--top-k", 1, "--seed", -3],
    "a draw of the best": ["-p", PROMPT, "--temperature", 2, "--min-p", 1.0],
    "a pattern": ["-p", PROMPT, "--regex", " ?[5-9]{2}x?"],
    "a pattern in a chat": ["-p", PROMPT, "--regex", " ?[5-9]{2}x?", "--chat"],
    "no prompt": ["-p", ""],
    "too long": ["-p", PROMPT * 80],
    "no room": ["-p", PROMPT, "--max-new-tokens", 600],
    "bad sampling": ["-p", PROMPT, "--top-k", 3],
    "an empty stop": ["-p", PROMPT, "--stop", ""],
    "no score method": ["-p", PROMPT, "--prompt-lookup", 3],
}


@pytest.fixture(scope="module")
def native(demo_bundle: Path) -> dict[str, Any]:
    require_native()
    calls = {name: ["generate", str(demo_bundle), *map(str, arguments)] for name, arguments in SAME.items()}
    calls["json"] = [*calls["plain"], "--json"]
    calls["drawn"] = [*calls["plain"], "--temperature", "3", "--seed", "5", "--max-new-tokens", "12"]
    calls["drawn again"] = calls["drawn"]
    calls["drawn otherwise"] = ["6" if argument == "5" else argument for argument in calls["drawn"]]
    calls["bench"] = ["bench", str(demo_bundle), "--steps", "2", "--positions", "0", "--positions", "30", "--json"]
    calls["bench past the cache"] = ["bench", str(demo_bundle), "--positions", "600"]
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from exportable_cache.cli.app import app\n"
        "found = {}\n"
        f"for name, arguments in {calls!r}.items():\n"
        "    result = CliRunner().invoke(app, arguments)\n"
        "    found[name] = [result.exit_code, result.stdout, result.stderr]\n"
        "heavy = [name for name in ('torch', 'transformers', 'executorch') if name in sys.modules]\n"
        "print(json.dumps({'results': found, 'heavy': heavy}))\n"
    )
    done = run_native(code)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SAME)
def test_the_text_is_that_of_torch(native: dict[str, Any], run: Any, demo_bundle: Path, name: str) -> None:
    if "pattern" in name:
        pytest.importorskip("llguidance")
    code, stdout, stderr = native["results"][name]
    expected = run("generate", demo_bundle, *SAME[name])
    assert (code, stdout) == (expected.exit_code, expected.stdout), (stderr, expected.stderr)
    # Errors of the runner have other words, and the same place for the number of tokens.
    counts = [text.partition(";")[0] for text in (stderr, expected.stderr)]
    assert code or counts[0] == counts[1]


def test_nothing_heavy_is_imported(native: dict[str, Any]) -> None:
    assert native["heavy"] == []


def test_json_has_the_same_fields(native: dict[str, Any], run: Any, demo_bundle: Path) -> None:
    found = json.loads(native["results"]["json"][1])
    expected = json.loads(run("generate", demo_bundle, "-p", PROMPT, "--json").stdout)
    assert list(found) == list(expected)
    same = ("path", "prompt", "prompt_tokens", "text", "new_tokens", "decode_steps")
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert found["first_seconds"] > 0


def test_bench_measures_the_native_runner(native: dict[str, Any], run: Any, demo_bundle: Path) -> None:
    code, stdout, stderr = native["results"]["bench"]
    assert code == 0, stderr
    report = json.loads(stdout)
    assert (report["runtime"], report["batch_size"], report["threads"]) == ("native", 1, None)
    assert [(row["position"], row["steps"]) for row in report["decode"]] == [(0, 2), (30, 2)]
    arguments = ("bench", demo_bundle, "--steps", 1, "--positions", 0, "--json")
    expected = json.loads(run(*arguments).stdout)
    assert expected["runtime"] == "torch" and list(report) == list(expected)
    assert report["prompt_length"] == expected["prompt_length"]
    code, _, stderr = native["results"]["bench past the cache"]
    assert code == 2 and "positions must be 0 to 477, to fit the cache, got 600" in stderr


def test_a_seed_repeats_a_draw(native: dict[str, Any]) -> None:
    first, again, other = (native["results"][name][1] for name in ("drawn", "drawn again", "drawn otherwise"))
    assert first == again != other


@pytest.mark.full
def test_an_encoder_decoder_gives_the_same_text(run: Any, tmp_path: Path) -> None:
    require_native()
    model, folder = tiny_seq2seq("t5"), tmp_path / "t5"
    sizes = {"prefill_chunk": 8, "max_encoder_len": 32}
    export(model, "executorch", 24, folder, verify=False, tokenizer=byte_tokenizer(), **sizes)
    arguments = ["generate", str(folder), "-p", "hello", "--max-new-tokens", "9", "--repetition-penalty", "1.5"]
    done = run_native(f"import sys\nsys.argv[1:] = {arguments!r}\n{COMMAND_LINE}")
    expected = run(*arguments)
    assert expected.exit_code == 0 and done.stdout == expected.stdout, done.stderr
    assert done.stderr.partition(";")[0] == expected.stderr.partition(";")[0] == "5 prompt tokens, 9 new"


def test_a_note_says_why_torch_runs_it(run: Any, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "auto")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise NotNative("the reason")

    monkeypatch.setattr("exportable_cache.session.native.open_native", refuse)
    result = run("generate", demo_bundle, "-p", PROMPT)
    assert result.exit_code == 0 and result.stdout == " 4821.\n"
    assert "using torch's runtime, which starts more slowly: the reason\n" in result.stderr


def test_files_are_left_to_torch(run: Any, demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(runtime, "open_natively", lambda *arguments: opened.append(arguments))
    result = run("generate", demo_bundle, "-p", PROMPT, "--image", tmp_path / "x.png")
    assert result.exit_code == 2 and "takes only text" in result.stderr and opened == []
    assert "using torch's runtime" not in result.stderr
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "auto")
    result = run("generate", demo_bundle, "-p", PROMPT, "--image", tmp_path / "x.png")
    assert "more slowly: images and audio need the model's processor" in result.stderr and opened == []
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "native")
    result = run("generate", demo_bundle, "-p", PROMPT, "--image", tmp_path / "x.png")
    assert result.exit_code == 2 and "EXPORTABLE_CACHE_RUNTIME must not be 'native'" in result.stderr
