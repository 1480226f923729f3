"""The model class of lm-evaluation-harness: its numbers are those of lm_eval's own class over transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from exportable_cache import Session, load
from exportable_cache.bundle.hub import HubChoice
from exportable_cache.demo import demo_path
from exportable_cache.errors import InputError
from exportable_cache.models.loading.loading import load_model

from ..support.models import tiny_model
from ..support.sessions import live_session
from .serving import served

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from exportable_cache.pipeline.lm_eval import ExportableCacheLM

FACT = "the code of amber is 4821. it took about 12 days. the old farmer slept near the house. amber? "
#: Tokens of a sequence, fewer than the longest requests have.
LENGTH = 100
SCORED = [
    ("", "the code"),
    (FACT, " 4821"),
    (FACT * 5, "4821. the"),
    ("the old ", "farmer"),
    *((FACT, choice) for choice in ("5", "4", "48", "9")),
]
CONTINUED: list[tuple[str, dict[str, Any]]] = [
    (FACT, {"until": ["."], "max_gen_toks": 10}),
    (FACT * 5, {"until": [], "max_gen_toks": 20, "do_sample": False, "top_p": 0.9}),
    ("the old", {"until": "e", "max_gen_toks": 20}),
]
TASK = """
task: amber
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
DOCS = "".join(json.dumps({"question": FACT, "choices": ["4", "7"], "target": target}) + "\n" for target in (0, 0, 1))
#: Tokens of a row of the server, more than the longest request has.
SERVED = 600
SERVER: dict[str, Any] = {
    **{"model": "demo", "tokenizer": str(demo_path()), "tokenizer_backend": "huggingface", "max_length": SERVED},
    **{"num_concurrent": 3, "max_retries": 1},
}


def requests(kind: str, calls: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=call, idx=0) for call in calls]  # type: ignore[arg-type]


def results(model: Any) -> tuple[Any, ...]:
    """Return log likelihoods, whether they are greedy, log likelihoods of whole texts, and generations."""
    scores = model.loglikelihood(requests("loglikelihood", SCORED), disable_tqdm=True)
    rolling = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(FACT * 4,), ("the",)]), disable_tqdm=True)
    texts = model.generate_until(requests("generate_until", CONTINUED), disable_tqdm=True)
    return [score for score, _ in scores], [greedy for _, greedy in scores], rolling, texts


@pytest.fixture(scope="module")
def expected() -> tuple[Any, ...]:
    return results(HFLM(pretrained=str(demo_path()), device="cpu", dtype="float32", max_length=LENGTH))


@pytest.mark.parametrize("where", ["bundle", "model"])
def test_numbers_are_those_of_the_class_for_transformers(
    where: str, expected: tuple[Any, ...], demo_bundle: Path
) -> None:
    given = {"compile": False, "device": "cpu"} if where == "model" else {}
    pretrained = "demo" if where == "model" else str(demo_bundle)
    scores, greedy, rolling, texts = results(ExportableCacheLM(pretrained, max_length=LENGTH, **given))
    assert scores == pytest.approx(expected[0], abs=1e-3) and greedy == expected[1]
    assert rolling == pytest.approx(expected[2], abs=2e-3) and texts == expected[3]
    assert {True, False} == set(greedy) and any(texts)


def test_the_command_of_lm_eval_finds_it(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(DOCS, encoding="utf-8")
    (tmp_path / "amber.yaml").write_text(TASK.replace("FILE", str(tmp_path / "docs.jsonl")), encoding="utf-8")
    command = [sys.executable, "-m", "exportable_cache.pipeline.lm_eval", "--model", "exportable_cache"]
    about = ["--model_args", "pretrained=demo,compile=False", "--device", "cpu", "--tasks", "amber"]
    files = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results.json")]
    done = subprocess.run(
        [*command, *about, *files], capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = tmp_path.glob("results*.json")
    assert json.loads(written.read_text())["results"]["amber"]["acc,none"] == pytest.approx(2 / 3)
    refused = subprocess.run(
        [*command, "--model_args", "pretrained=demo,max_length=9000", *about[2:], *files],
        capture_output=True, text=True, timeout=300, env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
    )  # fmt: skip
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: max_length must be from 2 to ")


@contextmanager
def served_model() -> Iterator[str]:
    """Serve the demo model in a thread, and yield the address of its completions."""
    loaded = load_model(demo_path())
    with served(Session.from_model(loaded.model, max_cache_len=SERVED, tokenizer=loaded.tokenizer)) as address:
        yield f"{address}/v1/completions"


def test_a_server_gives_the_numbers_of_the_class_for_transformers() -> None:
    """Run `local-completions` of lm_eval against `/v1/completions`, with several requests at a time."""
    expected = HFLM(pretrained=str(demo_path()), device="cpu", dtype="float32", max_length=SERVED - 1)
    with served_model() as url:
        model = LocalCompletionsAPI(base_url=url, batch_size=2, **SERVER)
        for kind, calls in (("loglikelihood", SCORED[1:]), ("loglikelihood_rolling", [(FACT * 4,), ("the",)])):
            found, right = (getattr(one, kind)(requests(kind, calls), disable_tqdm=True) for one in (model, expected))
            # Scores, and whether each is greedy, which counts as 0 or 1.
            assert torch.tensor(found, dtype=torch.float64).sub(torch.tensor(right)).abs().max() < 1e-3


def test_the_command_of_lm_eval_asks_a_server(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(DOCS, encoding="utf-8")
    (tmp_path / "amber.yaml").write_text(TASK.replace("FILE", str(tmp_path / "docs.jsonl")), encoding="utf-8")
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "amber"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results.json"), "--model_args"]
    with served_model() as url:
        words = ",".join(f"{name}={value}" for name, value in {"base_url": url, **SERVER}.items())
        done = subprocess.run(
            [*command, words], capture_output=True, text=True, timeout=300,
            env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = tmp_path.glob("**/results*.json")
    assert json.loads(written.read_text())["results"]["amber"]["acc,none"] == pytest.approx(2 / 3)


def test_a_bundle_of_the_hub_is_downloaded(demo_bundle: Path) -> None:
    with mock.patch("exportable_cache.pipeline.lm_eval.bundle_of", return_value=str(demo_bundle)) as fetched:
        model = ExportableCacheLM("user/name", revision="v1", check=True)
    assert fetched.call_args.args == ("user/name", HubChoice(revision="v1"))
    assert model.session.target == "executorch"


def test_what_it_cannot_do_is_refused(demo_bundle: Path) -> None:
    session = load(demo_bundle)
    for pretrained, given, message in (
        (session, {"batch_size": 8}, "batch_size must be 1 or 'auto', got 8"),
        (session, {"trust": True}, "trust is not an option of an open session; leave it out"),
        (session, {"max_length": "abc"}, "max_length must be an int of at least 2, got 'abc'"),
        (session, {"max_length": 50.5}, "max_length must be an int of at least 2, got 50.5"),
        (session, {"max_gen_toks": "x"}, "max_gen_toks must be an int of at least 1, got 'x'"),
        (3, {}, "pretrained must be a bundle, the name of a model or a Session, got 3; pass --model_args pretrained=X"),
        ("", {}, "pretrained must be a bundle, the name of a model or a Session, got ''"),
        (session, {"device": "cuda:0"}, "device must be 'cpu' for an open session, got 'cuda:0'; leave it out"),
        (
            str(demo_bundle),
            {"device": "cpu", "dtype": "float16"},
            "dtype is not an option of a bundle; it takes check, ",
        ),
        ("demo", {"revision": "main"}, "revision must be left out for the path 'demo'"),
        ("demo", {"key": "k"}, "key is not an option of a model; it takes device, dtype"),
        (live_session(tiny_model("llama"), False, 32, batch_size=2), {}, "batch_size must be 1 for lm_eval, got 2"),
        (live_session(tiny_model("llama"), False, 32), {}, "a tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            ExportableCacheLM(pretrained, **given)
    without = load(demo_bundle)
    without.tokenizer.eos_token = None
    with pytest.raises(InputError, match="the tokenizer must have an end token for lm_eval, got eos_token=None"):
        ExportableCacheLM(without)
    model = ExportableCacheLM(session, max_length=16, device="cpu")
    with pytest.raises(InputError, match="at most 16 tokens, got 17; export with"):
        model.loglikelihood(requests("loglikelihood", [("the", FACT[:40])]), disable_tqdm=True)
    with pytest.raises(InputError, match="max_gen_toks must be from 1 to 15 with a max_length of 16, got 16"):
        model.generate_until(requests("generate_until", [("the", {"max_gen_toks": 16})]), disable_tqdm=True)
    with pytest.raises(InputError, match="generation settings must be .*'max_gen_toks': 'x'.*; correct --gen_kwargs"):
        model.generate_until(requests("generate_until", [("the", {"max_gen_toks": "x"})]), disable_tqdm=True)
    with pytest.warns(UserWarning, match="num_beams"):
        settings = {"max_gen_toks": 4, "num_beams": 4}
        model.generate_until(requests("generate_until", [("the", settings)]), disable_tqdm=True)
    with pytest.raises(InputError, match="add_generation_prompt must be True"):
        model.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=False)
