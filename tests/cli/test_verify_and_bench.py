"""verify, generate and bench of a tiny bundle, and every bad input they must refuse."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from exportable_cache import load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.manifest import Manifest
from exportable_cache.bundle.signing import private_key, sign
from exportable_cache.cli.command import EXIT_INPUT

from ..support.forked import COMMAND_LINE, run_python
from ..support.models import tiny_model, tokens
from .bundles import MAX_CACHE_LEN, refused

pytestmark = pytest.mark.usefixtures("fake_backend")


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_agrees(run, exported, tiny_folder):
    result = run("verify", exported.path, "--model", tiny_folder, "--decode-steps", 4)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("verified: ")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:7]] == ["3", "7", "8", "9", "40", "48"]


def test_verify_json(run, exported, tiny_folder):
    document = json.loads(run("verify", exported.path, "--model", tiny_folder, "--decode-steps", 4, "--json").stdout)
    assert document["passed"] is True and document["max_difference"] <= document["tolerance"] == 1e-4
    assert [prompt["length"] for prompt in document["prompts"]] == [3, 7, 8, 9, 40, 48]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    """The same architecture with other weights."""
    model = tiny_model("gemma2")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    folder = tmp_path_factory.mktemp("models") / "other"
    model.save_pretrained(folder)
    return folder


def test_verify_exits_with_1_on_a_mismatch(run, exported, other_folder):
    result = run("verify", exported.path, "--model", other_folder, "--decode-steps", 4)
    assert result.exit_code == 1
    assert "NOT verified" in result.stdout and "exceeds 1e-04" in result.stdout
    result = run("verify", exported.path, "--model", other_folder, "--decode-steps", 4, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False
    assert "NOT verified" in result.stderr


def test_verify_tolerance_decides(run, exported, other_folder):
    assert run("verify", exported.path, "--model", other_folder, "--decode-steps", 4, "--tolerance", 1e6).exit_code == 0


def test_verify_records_its_report_where_asked(run, exported, tiny_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported.path, folder)
    before = Manifest.read(folder)
    arguments = ("verify", folder, "--model", tiny_folder, "--decode-steps", 3)
    assert run(*arguments).exit_code == 0 and Manifest.read(folder) == before
    assert run(*arguments, "--record", "--tolerance", 0.5).exit_code == 0
    after = Bundle.open(folder).manifest
    assert after.verification["tolerance"] == 0.5 and after.verification["steps"] != before.verification["steps"]
    assert after.model_copy(update={"verification": before.verification}) == before


def test_verify_signs_again_what_is_signed(run, exported, tiny_folder, tmp_path):
    folder, key = tmp_path / "copy", tmp_path / "key.pem"
    shutil.copytree(exported.path, folder)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.write_bytes(pem)
    sign(folder, (folder / "manifest.json").read_bytes(), private_key(key))
    before = (folder / "manifest.json").read_bytes()
    arguments = ("verify", folder, "--model", tiny_folder, "--decode-steps", 3, "--record")
    result = run(*arguments)
    assert result.exit_code == EXIT_INPUT and "is signed" in result.stderr and "--sign" in result.stderr
    assert (folder / "manifest.json").read_bytes() == before
    assert run(*arguments, "--sign", key).exit_code == 0
    assert Bundle.open(folder, key=key).manifest.verification["steps"] != 0
    assert (folder / "manifest.json").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tolerance", "-1"], ("--tolerance", "-1", "at least 0")),
        (["--tolerance", "0"], ("tolerance", "0", "above 0")),
        (["--decode-steps", "46"], ("got 3 and 46", str(MAX_CACHE_LEN))),
    ],
)
def test_verify_refuses_bad_arguments(run, exported, tiny_folder, arguments, words):
    refused(run("verify", exported.path, "--model", tiny_folder, *arguments), *words)


def test_verify_refuses_another_kind_of_model(run, exported, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    refused(run("verify", exported.path, "--model", tmp_path), "gemma2", "llama")


# -- generate and bench ------------------------------------------------------------------------------------------------


def test_generate_needs_a_tokenizer(run, exported):
    refused(run("generate", exported.path, "--prompt", "hello"), "tokenizer")


def test_bench_json(run, exported):
    result = run(
        "bench", exported.path, "--steps", 2, "--positions", 0, "--positions", 20, "--prompt-length", 8, "--json"
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [row["position"] for row in document["decode"]] == [0, 20]
    assert document["prompt_length"] == 8 and document["prefill_tokens_per_second"] > 0


def test_bench_table(run, exported):
    result = run("bench", exported.path, "--steps", 2, "--positions", 5)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("prefill  ")
    assert any(line.split()[:1] == ["5"] for line in result.stdout.splitlines())
    assert "peak memory" in result.stdout


def test_bench_prints_the_rows_of_llama_bench(run, exported):
    result = run("bench", exported.path, "--pp", 16, "--tg", 4, "--runs", 2)
    assert result.exit_code == 0, result.stderr
    head, rule, *rows = result.stdout.splitlines()
    assert head == "| model | runtime | threads | test | t/s |" and rule == "| --- | --- | ---: | ---: | ---: |"
    assert [row.split(" | ")[:4] for row in rows] == [["| tiny", "torch", "1", test] for test in ("pp16", "tg4")]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d \|", row.split(" | ")[4]) for row in rows)
    report = json.loads(run("bench", exported.path, "--tg", 4, "--runs", 2, "--json").stdout)
    (row,) = report["rows"]
    assert (report["runtime"], row["test"], row["n_gen"], len(row["samples_ts"])) == ("torch", "tg4", 4, 2)
    for arguments, words in (
        (["--markdown"], ("pp must be 1 to", "got 512")),
        (["--tg", 2, "--positions", 1], ("cannot be combined with --positions",)),
        (["--pp", 2, "--steps", 3], ("cannot be combined with --positions, --steps",)),
        (["--runs", 3], ("needs --pp, --tg or --markdown",)),
        (["--markdown", "--json"], ("cannot be combined with --json",)),
        (["--pp", 0], ("--pp", "at least 1")),
    ):
        refused(run("bench", exported.path, *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", MAX_CACHE_LEN], ("steps", str(MAX_CACHE_LEN), "45")),
        (["--positions", MAX_CACHE_LEN], ("position", str(MAX_CACHE_LEN))),
        (["--prompt-length", MAX_CACHE_LEN + 1], ("prompt_length", str(MAX_CACHE_LEN + 1), str(MAX_CACHE_LEN))),
        (["--steps", 0], ("--steps", "got 0", "at least 1")),
    ],
)
def test_bench_refuses_what_does_not_fit(run, exported, arguments, words):
    refused(run("bench", exported.path, *arguments), *words)


# -- for real ----------------------------------------------------------------------------------------------------------


def test_the_recipe_runs(tiny_folder, tmp_path, monkeypatch, capsys):
    script = str(Path(__file__).parents[2] / "export_scripts" / "export_and_verify.py")
    arguments = [script, tiny_folder, tmp_path / "x", "--target", "fake", "--max-cache-len", "16"]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].startswith("verified: ")
    assert load(tmp_path / "x").prefill(tokens(5)).shape == (1, 128)


def test_a_process_of_its_own_refuses_on_stderr_alone(exported):
    """What one prints that succeeds: test_demo.py."""
    done = run_python(COMMAND_LINE, "inspect", exported.path / "missing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: ")
