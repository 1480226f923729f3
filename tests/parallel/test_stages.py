"""A model whose layers are split over processes, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.pipeline.plan import plan

from ..support.models import tiny_model, tokens
from ..support.oracle import reference_logits
from . import split_checks
from .checks import CAPACITY, FAMILY, LENGTH, PROMPT, REPEATED
from .pipeline_checks import continuous_over_stages, submit_all
from .processes import run_ranks

# In the fast lane processes that split heads and contexts: test_sessions.py, test_context.py.
pytestmark = pytest.mark.full

#: Layers of both kinds on each of two stages.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
#: The others' kinds of layers are apart: the last stage has full ones behind the first one's sliding ones.
OTHERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "gpt_oss": {**LAYERS, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
    "qwen3": {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "mixtral": {"num_hidden_layers": 4, "num_local_experts": 4},
}


def one_process(rows: int = 1) -> Session:
    model = tiny_model(FAMILY, **LAYERS)
    return Session.from_model(model, ExportableCache.from_model(model, CAPACITY, rows))


def served(model: Any) -> list[list[int]]:
    """Tokens of the same requests, of one process."""
    batch = ContinuousBatch.from_model(model, CAPACITY, 4)
    requests = submit_all(batch)
    for _ in batch.run():
        pass
    return [request.tokens for request in requests]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stages")
    tiny_model(FAMILY, **LAYERS).save_pretrained(folder / FAMILY)
    results = [one["staged"][FAMILY] for one in run_ranks(folder, 2, (split_checks.staged,))]
    assert not any(isinstance(one, str) for one in results), "\n".join(map(str, results))
    return results


def test_logits_are_those_of_one_process_past_the_window(found: list[dict[str, Any]]) -> None:
    expected = reference_logits(tiny_model(FAMILY, **LAYERS), tokens(LENGTH), PROMPT)
    for one in found:
        assert (one["logits"] - expected).abs().max() < 1e-4
    assert torch.equal(found[0]["logits"], found[1]["logits"])


def test_each_stage_keeps_its_own_layers(found: list[dict[str, Any]]) -> None:
    assert [one["kept"] for one in found] == [[True, True, False, False], [False, False, True, True]]
    whole = sum(parameter.numel() for parameter in tiny_model(FAMILY, **LAYERS).parameters())
    assert all(one["parameters"] < 0.7 * whole for one in found)
    planned = plan(tiny_model(FAMILY, **LAYERS).config, CAPACITY, rollback_slots=3, pipeline=2).pipeline
    assert planned.layers == ((0, 2), (2, 4))
    assert [one["bytes"] for one in found] == list(planned.cache_bytes)
    assert [4 * one["parameters"] for one in found] == list(planned.weights_bytes)


def test_tokens_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    expected = list(one_process().generate(REPEATED, max_new_tokens=16))
    for one in found:
        assert one["tokens"] == one["drafted"] == expected


def test_rows_go_through_in_micro_batches(found: list[dict[str, Any]]) -> None:
    prompts = [tokens(5)[0], tokens(14, seed=1)[0], tokens(9, seed=2)[0]]
    expected = [step.tolist() for step in one_process(3).generate(prompts, max_new_tokens=12)]
    assert [one["rows"] for one in found] == [expected] * 2
    first, last = (one["sent"] for one in found)
    # Before them one token of two rows of different length, which tells whether the model can take such.
    assert first[-2:] == [2, 1] and set(first) == {1, 2} and not last


def test_refusals(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "neither saved nor loaded" in one["saved"]
        assert "decode got other tokens" in one["prompt"]
        assert "leave out compile" in one["compiled"]
        assert one["given back"]


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4])
def test_families(stages: int, tmp_path: Path) -> None:
    models = {name: tiny_model(name, **fields) for name, fields in OTHERS.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    for one in run_ranks(tmp_path, stages, (split_checks.staged,)):
        for name, model in models.items():
            result = one["staged"][name]
            assert isinstance(result, dict), result
            expected = reference_logits(model, tokens(LENGTH), PROMPT)
            assert (result["logits"] - expected).abs().max() < 1e-4, name


@pytest.mark.parametrize("stages", [2, 4])
def test_a_continuous_batch_keeps_the_stages_busy(stages: int, tmp_path: Path) -> None:
    models = {name: tiny_model(name, **fields) for name, fields in {FAMILY: LAYERS, **OTHERS}.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    expected = {name: served(model) for name, model in models.items()}
    for one in run_ranks(tmp_path, stages, (continuous_over_stages,)):
        assert not isinstance(one["continuous_over_stages"], str), one
        for name, result in one["continuous_over_stages"].items():
            assert result["continuous"] == expected[name], name
            # As many groups of rows as stages, which begin their steps while those of all others are under way, as long
            # as these have any to come.
            calls, under_way, groups = result["calls"], set(), range(0, 4, 4 // stages)
            for index, (kind, group) in enumerate(calls):
                if kind == "begin" and index >= stages:
                    assert under_way >= {
                        other for other in groups if other != group and ("begin", other) in calls[index:]
                    }
                under_way ^= {group}
            assert {group for _, group in calls} == set(groups) and not under_way
            assert f"steps of {min(stages - 1, 1)} groups of rows are under way" in result["under way"]
            assert result["forward"] == (False, True)
