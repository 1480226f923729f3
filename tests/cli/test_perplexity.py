"""Perplexity: the loss is that of transformers over the same windows, and the command reports it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from exportable_cache import ExportableCache, Session, load
from exportable_cache.demo import demo_path
from exportable_cache.errors import InputError, NonFiniteLogitsError
from exportable_cache.pipeline.perplexity import perplexity

from ..decoding.byte_tokenizer import byte_tokenizer
from ..support.forked import COMMAND_LINE
from ..support.models import tiny_model
from ..support.native import require_native, run_native
from ..support.seq2seq import tiny_seq2seq
from ..support.sessions import live_session
from .bundles import refused

TEXT = "the code of amber is 4821. it took about 12 days. the old farmer slept near the house. amber? 4821. " * 4
#: Window and stride: disjoint, overlapping, and one that leaves a short last window.
SIZES = [(32, 32), (32, 8), (50, 33), (400, None)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_path()).eval()


@torch.no_grad()
def upstream(model: PreTrainedModel, window: int, stride: int) -> tuple[float, int]:
    """Return the mean loss of transformers, in windows as its documentation makes them, and the number of tokens."""
    ids = AutoTokenizer.from_pretrained(demo_path())(TEXT, return_tensors="pt")["input_ids"]
    total, count, previous = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : -(end - previous)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            total += float(model(ids[:, begin:end], labels=labels).loss) * scored
        count, previous = count + scored, end
        if end == ids.shape[1]:
            break
    return total / count, count


@pytest.mark.parametrize(("window", "stride"), SIZES)
def test_the_loss_of_a_program_is_that_of_transformers(
    model: PreTrainedModel, demo_bundle: Path, window: int, stride: int | None
) -> None:
    session = load(demo_bundle)
    report = perplexity(session, TEXT, window=window, stride=stride)
    loss, count = upstream(model, window, stride or window)
    assert report.loss == pytest.approx(loss, abs=2e-5) and report.scored_tokens == count
    assert report.perplexity == pytest.approx(math.exp(loss), rel=1e-4) and report.error > 0
    assert session.length.tolist() == [0]


@pytest.mark.parametrize(("window", "stride"), SIZES[:3])
def test_several_tokens_a_step_score_the_same(model: PreTrainedModel, window: int, stride: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    cache = ExportableCache.from_model(model, 64)
    with Session.from_model(model, cache, score_length=7, tokenizer=tokenizer) as session:
        report = perplexity(session, TEXT, window=window, stride=stride)
    assert report.loss == pytest.approx(upstream(model, window, stride)[0], abs=2e-5)


def test_the_native_runner_scores_the_same(model: PreTrainedModel, demo_bundle: Path, tmp_path: Path) -> None:
    require_native()
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    arguments = ["perplexity", str(demo_bundle), "--text", str(file), "--window", "32", "--stride", "8", "--json"]
    done = run_native(f"import sys\nsys.argv[1:] = {arguments!r}\n{COMMAND_LINE}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == pytest.approx(upstream(model, 32, 8)[0], abs=2e-5)


def test_the_command_takes_a_model(run: Any, model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    sizes = ("--window", 32, "--stride", 8, "--no-compile", "--max-cache-len", 128, "--device", "cpu", "--json")
    result = run("perplexity", "demo", "--text", file, *sizes)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(upstream(model, 32, 8)[0], abs=2e-5)
    # A cache of fewer tokens than a step could score.
    small = run("perplexity", "demo", "--text", file, "--no-compile", "-n", 32, "--device", "cpu")
    assert small.exit_code == 0, small.stderr
    assert "windows of 32, stride 32" in small.stdout


def test_an_infinite_perplexity_is_valid_json(run: Any, tmp_path: Path) -> None:
    large = AutoModelForCausalLM.from_pretrained(demo_path())
    large.lm_head.weight.data *= 1e5
    large.save_pretrained(tmp_path / "large")
    AutoTokenizer.from_pretrained(demo_path()).save_pretrained(tmp_path / "large")
    (tmp_path / "text.txt").write_text(TEXT[:60], encoding="utf-8")
    options = ("--no-compile", "-n", 128, "--device", "cpu", "--json")
    result = run("perplexity", tmp_path / "large", "--text", tmp_path / "text.txt", *options)
    assert result.exit_code == 0, result.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads(result.stdout, parse_constant=refuse)
    assert report["loss"] > 709 and report["perplexity"] is report["error"] is None


def test_the_error_is_that_of_a_mean() -> None:
    session = live_session(tiny_model("llama", vocab_size=300), False, 64, tokenizer=byte_tokenizer())
    report = perplexity(session, "abcdefgh" * 4, max_tokens=16, window=16)
    session.reset()
    ids = torch.tensor([session.text_tokenizer("abcdefgh" * 4)["input_ids"][:16]])
    losses = []
    logits = session.prefill(ids[:, :1])
    for token in ids[0, 1:]:
        losses.append(-float(logits[0].log_softmax(-1)[token]))
        logits = session.decode(token[None])
    spread = torch.tensor(losses, dtype=torch.float64)
    assert report.scored_tokens == 15 and report.tokens == 16
    assert report.loss == pytest.approx(float(spread.mean()), abs=1e-5)
    assert report.error == pytest.approx(math.exp(spread.mean()) * float(spread.std()) / 15**0.5, rel=1e-4)


def test_what_cannot_be_scored_is_refused() -> None:
    tokenizer = byte_tokenizer()
    session = live_session(tiny_model("llama", vocab_size=300), False, 32, tokenizer=tokenizer)
    for options, message in (
        ({"window": 33}, "window must be at most 32, which the cache holds, got 33"),
        ({"window": 1}, "window must be an int of at least 2, got 1"),
        ({"window": 8, "stride": 9}, "stride must be at most the window of 8 tokens, got 9"),
        ({"stride": 0}, "stride must be an int of at least 1, got 0"),
        ({"max_tokens": 1}, "max_tokens must be an int of at least 2, got 1"),
    ):
        with pytest.raises(InputError, match=message):
            perplexity(session, "abc", **options)
    with pytest.raises(InputError, match="at least 2 tokens"):
        perplexity(session, "")
    with pytest.raises(InputError, match="a tokenizer"):
        perplexity(live_session(tiny_model("llama"), False, 32), "abc")
    with pytest.raises(InputError, match="batch_size must be 1 for perplexity, got 2"):
        perplexity(live_session(tiny_model("llama"), False, 32, batch_size=2), "abc")
    with pytest.raises(InputError, match="text decoder"):
        perplexity(live_session(tiny_seq2seq("bart"), False, 32, tokenizer=tokenizer), "abc")
    large = tiny_model("llama", vocab_size=300)
    large.lm_head.weight.data *= 1e5
    report = perplexity(live_session(large, False, 32, tokenizer=tokenizer), "abcdef")
    assert report.loss > 709 and report.perplexity == math.inf
    broken = tiny_model("llama", vocab_size=300)
    broken.lm_head.weight.data[3] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="not finite after 1 tokens"):
        perplexity(live_session(broken, False, 32, tokenizer=tokenizer), "abcdef")


def test_the_command_reports_it(run: Any, demo_bundle: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    loss, count = upstream(model, 32, 16)
    sizes = ("--window", 32, "--stride", 16)
    result = run("perplexity", demo_bundle, "--text", file, *sizes)
    assert result.exit_code == 0, result.stderr
    assert float(result.stdout.split()[1]) == pytest.approx(math.exp(loss), rel=1e-4)
    assert f"of {count} tokens, windows of 32, stride 16\n" in result.stdout
    report = json.loads(run("perplexity", demo_bundle, "--text", file, *sizes, "--json").stdout)
    assert report["loss"] == pytest.approx(loss, abs=2e-5) and report["window"] == 32
    refused(run("perplexity", demo_bundle, "--text", tmp_path / "none.txt"), "cannot read", "none.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    refused(run("perplexity", demo_bundle, "--text", tmp_path / "bytes"), "pass a file of UTF-8 text")
    refused(run("perplexity", demo_bundle, "--text", file, "--window", 5000), "window must be at most 512")
