"""Sessions over a model that is split over two processes, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exportable_cache import ExportableCache, Session
from exportable_cache.models.weights import fingerprint
from exportable_cache.pipeline.plan import plan

from ..support.models import tiny_model, tokens
from ..support.oracle import reference_logits
from . import checks
from .checks import CAPACITY, FAMILY, LENGTH, NEW, PROMPT, REPEATED
from .processes import run_ranks

ALL = (
    checks.logits_past_the_window,
    checks.taken_back,
    checks.greedy,
    checks.drawn,
    checks.speculated,
    checks.several_steps,
    checks.rows,
    checks.continuous,
    checks.perturbed,
    checks.perturbed_apart,
    checks.saved,
    checks.disagreements,
    checks.refusals,
    checks.heads_that_do_not_divide,
    checks.split_by_hand,
    checks.offloaded,
    checks.census,
    checks.killed,
)


def one_process(**options: Any) -> Session:
    model = tiny_model(FAMILY)
    return Session.from_model(model, ExportableCache.from_model(model, CAPACITY), **options)


def one_layer() -> Any:
    """To be compiled: ranks agree on tokens behind its last layer."""
    return tiny_model("llama", num_hidden_layers=1)


def one_head() -> Any:
    return tiny_model("gemma3_text", num_key_value_heads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    tiny_model(FAMILY).save_pretrained(path / FAMILY)
    one_layer().save_pretrained(path / "one_layer")
    one_head().save_pretrained(path / "one_head")
    tiny_model("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3).save_pretrained(
        path / "three_heads"
    )
    session = one_process()
    session.prefill(tokens(LENGTH)[:, :PROMPT])
    session.save_state(path / "by-one.safetensors")
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each check gave on each of two ranks."""
    return run_ranks(folder, 2, ALL)


def of(found: list[dict[str, Any]], check: Any) -> list[Any]:
    """What a check gave, by rank."""
    results = [one.get(check.__name__, "the process ended") for one in found]
    failed = [one for one in results if isinstance(one, str) and "Traceback" in one]
    assert not failed, failed[0]
    return results


def reference() -> torch.Tensor:
    return reference_logits(tiny_model(FAMILY), tokens(LENGTH), PROMPT)


def test_logits_are_those_of_one_process_past_the_window(found: list[dict[str, Any]]) -> None:
    results = of(found, checks.logits_past_the_window)
    for one in results:
        assert (one["logits"] - reference()).abs().max() < 1e-4
    assert torch.equal(results[0]["logits"], results[1]["logits"])


def test_each_rank_keeps_its_own_heads(found: list[dict[str, Any]]) -> None:
    whole = ExportableCache.from_model(tiny_model(FAMILY), CAPACITY)
    lengths = sum(layer.cumulative_length.nbytes for layer in whole.layers)
    for one in of(found, checks.logits_past_the_window):
        assert one["heads"] == [1, 1]
        assert one["bytes"] - lengths == (whole.nbytes - lengths) / 2


def test_the_fingerprint_is_that_of_the_whole_model(found: list[dict[str, Any]]) -> None:
    expected = fingerprint(tiny_model(FAMILY))
    assert [one["fingerprint"] for one in of(found, checks.logits_past_the_window)] == [expected] * 2


def test_tokens_are_taken_back(found: list[dict[str, Any]]) -> None:
    for one in of(found, checks.taken_back):
        assert (one["again"] - reference()[:, -3:]).abs().max() < 1e-4
        assert (one["anew"] - reference()).abs().max() < 1e-4


def test_greedy_tokens_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    expected = list(one_process().generate(REPEATED, max_new_tokens=NEW))
    assert of(found, checks.greedy) == [expected] * 2
    assert of(found, checks.several_steps) == [expected] * 2
    assert [one[0] for one in of(found, checks.speculated)] == [expected] * 2


def test_drawn_tokens_agree_without_a_seed(found: list[dict[str, Any]]) -> None:
    for check in (checks.drawn, checks.speculated):
        first, second = of(found, check)
        assert first == second


def test_rows_of_different_length(found: list[dict[str, Any]]) -> None:
    model = tiny_model(FAMILY)
    session = Session.from_model(model, ExportableCache.from_model(model, CAPACITY, 3))
    prompts = [tokens(5)[0], tokens(14, seed=1)[0], tokens(9, seed=2)[0]]
    expected = [step.tolist() for step in session.generate(prompts, max_new_tokens=12)]
    assert of(found, checks.rows) == [expected] * 2


def test_a_continuous_batch(found: list[dict[str, Any]]) -> None:
    first, second = of(found, checks.continuous)
    assert first == second
    for request, length, seed in ((0, 4, 0), (3, 13, 3)):
        assert first[request] == list(one_process().generate(tokens(length, seed=seed), max_new_tokens=8))


def test_ranks_take_the_same_token_whatever_their_sums_are(found: list[dict[str, Any]]) -> None:
    first, second = of(found, checks.perturbed)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    # Rank 0's own sums are as they were.
    assert first[0] == of(found, checks.greedy)[0]
    model = one_layer()
    alone = Session.from_model(model, ExportableCache.from_model(model, CAPACITY))
    assert of(found, checks.perturbed_apart) == [list(alone.generate(REPEATED, max_new_tokens=NEW))] * 2


def test_one_file_for_all_ranks_and_for_one_process(found: list[dict[str, Any]], folder: Path) -> None:
    for one in of(found, checks.saved):
        for logits in (one["same"], one["other"]):
            assert (logits - reference()[:, 1:]).abs().max() < 1e-4
    ours, theirs = (load_file(folder / f"by-{who}.safetensors") for who in ("one", "ranks"))
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in ours)
    session = one_process()
    session.load_state(folder / "by-ranks.safetensors")
    logits = session.decode(tokens(LENGTH)[:, PROMPT])
    assert (logits - reference()[:, 1]).abs().max() < 1e-4


def test_a_file_that_one_rank_cannot_read_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    first, second = of(found, checks.saved)
    assert "rank 1 of 2 refused this" in first["missing"] and "BundleError" in first["missing"]
    assert "BundleError" in second["missing"]


def test_other_arguments_on_a_rank_are_refused_on_all(found: list[dict[str, Any]]) -> None:
    for one in of(found, checks.disagreements):
        assert "prefill got other input_ids on rank 1 of 2 than on rank 0" in one["prompt"]
        assert "other input_ids" in one["length"]
        assert "generate got other options on rank 1 of 2" in one["seed"]
        assert "other options" in one["stop"]
        assert "decode got other tokens" in one["tokens"]
        assert "another method" in one["call"]
        assert one["same"] == "nothing"
        assert "must be a token id from 0 to" in one["bad on all"]


def test_what_a_rank_cannot_do_by_itself_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(of(found, checks.refusals)):
        assert f"rank {rank} of 2" in one["save"] and "save_state()" in one["save"]
        assert "ExportableCache.from_model(model, ...) on each" in one["whole"]
        assert "split over 2 processes" in one["background"]
        assert "graph_cache must be None" in one["kept"]
        assert "rank 1 has torch 2.13.1, rank 0 2.13.0" in one["versions"]


def test_fewer_heads_than_ranks_are_repeated_and_others_refused(found: list[dict[str, Any]], folder: Path) -> None:
    model = one_head()
    expected = reference_logits(model, tokens(LENGTH), PROMPT)
    for one in of(found, checks.heads_that_do_not_divide):
        assert (one["logits"] - expected).abs().max() < 1e-4
        assert (one["again"] - expected[:, -1]).abs().max() < 1e-4
        assert one["heads"] == [1, 1] and one["parts"] == (1, 1)
        assert one["fingerprint"] == fingerprint(model)
        assert one["length"] == [LENGTH]
        assert "3 key and value heads, which 2 ranks cannot have equal parts of; use 1 or 3 ranks" in one["refused"]
    session = Session.from_model(model, ExportableCache.from_model(model, CAPACITY))
    session.load_state(folder / "one_head.safetensors")


def test_a_model_that_was_split_by_hand(found: list[dict[str, Any]]) -> None:
    for logits, parts, name, refused in of(found, checks.split_by_hand):
        assert (logits - reference()).abs().max() < 1e-4
        assert parts == (2, 2)
        assert name == fingerprint(tiny_model(FAMILY))
        assert "has its queries split over 2 ranks and its keys and values not" in refused


def test_offloaded_layers_of_a_rank(found: list[dict[str, Any]], folder: Path) -> None:
    for one in of(found, checks.offloaded):
        assert (one["logits"] - reference()).abs().max() < 1e-4
    session = one_process()
    session.load_state(folder / "offloaded.safetensors")
    assert session.length.tolist() == [LENGTH]


def test_a_step_sends_two_sums_a_layer(found: list[dict[str, Any]]) -> None:
    counts, sent = of(found, checks.census)[0]
    config = tiny_model(FAMILY).config
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    sums = sum(count for name, count in counts.items() if "all_reduce" in name or "allreduce" in name)
    # Those of the layers, and of the embedding, which is split by the vocabulary.
    assert sums == 2 * layers + 1, counts
    others = {name: count for name, count in counts.items() if "reduce" not in name}
    assert sum(others.values()) == 2, "the parts of the logits, and the token"
    assert sent == 4 * hidden * sums + 4 * vocab // 2 + 8
    planned = plan(config, CAPACITY, tensor_parallel=2).tensor_parallel
    assert (planned.messages, planned.sums) == (sum(counts.values()), sums)
    # Of what is gathered, the whole.
    assert planned.message_bytes == sent + 4 * vocab // 2
    assert planned.sent_bytes == 4 * hidden * sums + 4 * vocab // 2 + 8


def test_a_rank_that_dies_amid_a_step(found: list[dict[str, Any]], folder: Path) -> None:
    (message,) = of(found[:1], checks.killed)
    assert message.count("RankLostError: rank 1 of 2 is gone") == 2
    assert "load_state()" in message
    session = one_process()
    session.load_state(folder / "before.safetensors")
    assert session.length.tolist() == [REPEATED.shape[1]]
