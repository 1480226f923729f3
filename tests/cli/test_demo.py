"""The main job from the command line: the demo model on the ExecuTorch runtime."""

import json
import subprocess
import sys

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.cli.export import next_steps
from exportable_cache.demo.task import make_questions

from ..conftest import DEMO_MAX_CACHE_LEN

# Facts stated at least four windows of 16 tokens before the question: only the full layers' cache still holds them.
QUESTIONS = make_questions(6, seed=7, min_distance=64, tokens=(0, 400))


def test_answers_facts_from_far_back(run, demo_bundle):
    answers = [
        run("generate", demo_bundle, "--prompt", question.prompt, "--max-new-tokens", 16) for question in QUESTIONS
    ]
    assert all(answer.exit_code == 0 for answer in answers)
    right = sum(answer.stdout == question.answer + "\n" for answer, question in zip(answers, QUESTIONS, strict=True))
    # One miss is the model's; a cache that loses keys answers none (one guess in ten thousand is right).
    assert right >= len(QUESTIONS) - 1


def test_the_answer_depends_on_the_fact(run, demo_bundle):
    prompt = "the code of amber is {}. the quiet farmer slept near the garden. the code of walnut is 6073. amber?"
    for code in ("4821", "9035"):
        result = run("generate", demo_bundle, "-p", prompt.format(code))
        assert result.stdout == f" {code}.\n"


def test_chat(run, demo_bundle):
    result = run("generate", demo_bundle, "--chat", "-p", "the code of amber is 4821. amber?")
    assert result.stdout.strip() == "4821."


def test_inspect_shows_the_recorded_verification(run, demo_bundle):
    result = run("inspect", demo_bundle)
    assert result.exit_code == 0, result.stderr
    (verified,) = [line for line in result.stdout.splitlines() if line.startswith("verified: ")]
    assert "past the window of 16" in verified
    document = json.loads(run("inspect", demo_bundle, "--json").stdout)
    assert document["target"] == "executorch" and document["source"] == "demo"
    assert document["program"]["max_cache_len"] == DEMO_MAX_CACHE_LEN
    assert document["verification"]["passed"] is True


def test_an_export_ends_with_what_runs_it(demo_bundle):
    assert list(next_steps(Bundle.open(demo_bundle, check_files=False))) == [
        f"exportable-cache generate {demo_bundle} --prompt TEXT",
        f"exportable-cache chat {demo_bundle}",
        f"exportable-cache serve {demo_bundle}",
        "guide: docs/guides/phone.md",
    ]


def test_verify_agrees(run, demo_bundle):
    result = run("verify", demo_bundle, "--model", "demo", "--decode-steps", 4, "--seed", 3, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["max_difference"] <= 1e-4 and document["target"] == "executorch"


def test_a_full_cache_is_refused_before_anything_runs(run, demo_bundle):
    result = run("generate", demo_bundle, "-p", "the code of amber is 4821. " * 100)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(DEMO_MAX_CACHE_LEN) in result.stderr and "max_cache_len" in result.stderr


# In the fast lane: test_quiet.py, which looks at the lines of the same command.
@pytest.mark.full
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "text"])
def test_a_process_of_its_own_says_nothing_it_was_not_asked(shell, demo_bundle, arguments):
    done = shell("generate", demo_bundle, "-p", "the code of amber is 4821. amber?", *arguments)
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["text"] if arguments else done.stdout.rstrip("\n")) == " 4821."
    said = [line for line in done.stderr.splitlines() if not line.startswith(("opening ", "12 prompt tokens, "))]
    assert said == []


# In the fast lane: a reader that is gone, in security/test_one_sentence.py.
@pytest.mark.full
def test_a_reader_that_stops_early_is_no_error(demo_bundle):
    command = [sys.executable, "-m", "exportable_cache", "inspect", demo_bundle, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert "rror" not in complaint and "Traceback" not in complaint
