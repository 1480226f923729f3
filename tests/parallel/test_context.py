"""A context that is split over processes, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.cache.policies import SplitPolicy
from exportable_cache.errors import InputError

from ..support.models import tiny_model, tokens
from ..support.oracle import reference_logits
from . import split_checks
from .checks import FAMILY, LENGTH, PROMPT, REPEATED
from .processes import run_ranks
from .test_families import FAMILIES, family


def one_process(rows: int = 1) -> Session:
    model = tiny_model(FAMILY)
    return Session.from_model(model, ExportableCache.from_model(model, LENGTH, rows))


def saved(model: Any, path: Path) -> None:
    """A folder of a model, and a state that one process has reached."""
    model.save_pretrained(path)
    session = Session.from_model(model, ExportableCache.from_model(model, LENGTH))
    session.prefill(tokens(LENGTH)[:, :PROMPT])
    session.save_state(path / "by-one.safetensors")
    session.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context")
    saved(tiny_model(FAMILY), path / FAMILY)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    results = [one["context"][FAMILY] for one in run_ranks(folder, 2, (split_checks.context,))]
    assert not any(isinstance(one, str) for one in results), "\n".join(map(str, results))
    return results


def test_logits_of_a_sequence_longer_than_a_ranks_slots(found: list[dict[str, Any]]) -> None:
    expected = reference_logits(tiny_model(FAMILY), tokens(LENGTH), PROMPT)
    for one in found:
        assert (one["logits"] - expected).abs().max() < 1e-4
        assert "CacheFullError" in one["full"]
    assert torch.equal(found[0]["logits"], found[1]["logits"])


def test_each_rank_keeps_half_of_the_slots_of_full_layers(found: list[dict[str, Any]]) -> None:
    ring, full = one_process().cache.layers
    for rank, one in enumerate(found):
        assert f"SplitPolicy(tokens={LENGTH}, rank={rank}, size=2)" in one["layers"] and "RingPolicy" in one["layers"]
        slot = (full.nbytes - full.cumulative_length.nbytes) // LENGTH
        # One slot more takes what is not kept.
        assert one["bytes"] == ring.nbytes + full.cumulative_length.nbytes + slot * (LENGTH // 2 + 1)


def test_tokens_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    expected = list(one_process().generate(REPEATED, max_new_tokens=16))
    assert [one["tokens"] for one in found] == [expected] * 2
    prompts = [tokens(5)[0], tokens(14, seed=1)[0]]
    rows = [step.tolist() for step in one_process(2).generate(prompts, max_new_tokens=8)]
    assert [one["rows"] for one in found] == [rows] * 2


def test_one_file_for_all_ranks_and_for_one_process(found: list[dict[str, Any]], folder: Path) -> None:
    expected = reference_logits(tiny_model(FAMILY), tokens(LENGTH), PROMPT)
    for one in found:
        assert (one["resumed"] - expected[:, 1:]).abs().max() < 1e-4
    ours, theirs = one_process(), one_process()
    list(ours.generate(REPEATED, max_new_tokens=16))
    theirs.load_state(folder / FAMILY / "by-ranks.safetensors")
    assert theirs.length.tolist() == ours.length.tolist()
    token = torch.tensor([7])
    assert (theirs.decode(token) - ours.decode(token)).abs().max() < 1e-4


def test_attention_that_does_not_merge_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "attention that is not this package's" in one["other attention"]


def test_one_process_is_refused() -> None:
    with pytest.raises(InputError, match=r"there is 1; start several \(torchrun"):
        ExportableCache.from_model(tiny_model(FAMILY), 16, split_context=True)


@pytest.mark.parametrize("options", [{"offload": "host"}, {"attention_sinks": 4}])
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"split_context is given with {next(iter(options))}"):
        ExportableCache.from_model(tiny_model(FAMILY), 16, split_context=True, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_every_position_has_one_slot_on_one_rank(size: int) -> None:
    ranks = [SplitPolicy(7, rank, size) for rank in range(size)]
    positions = torch.arange(7)
    kept = torch.stack([policy.slots_of(positions) < policy.own for policy in ranks])
    assert kept.sum(0).tolist() == [1] * 7
    for policy in ranks:
        own = positions[policy.slots_of(positions) < policy.own]
        assert policy.positions(torch.tensor([[7]]))[0, : len(own)].tolist() == own.tolist()
        assert policy.mask_positions(torch.tensor([0]), 1, None)[0, policy.slots_of(own)].tolist() == own.tolist()


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_families(size: int, tmp_path: Path) -> None:
    names = [*FAMILIES, "gpt_oss", "gemma2"]
    models = {name: family(name) if name in FAMILIES else tiny_model(name) for name in names}
    for name, model in models.items():
        saved(model, tmp_path / name)
    for one in run_ranks(tmp_path, size, (split_checks.context,)):
        for name, model in models.items():
            result = one["context"][name]
            assert isinstance(result, dict), result
            expected = reference_logits(model, tokens(LENGTH), PROMPT)
            assert (result["logits"] - expected).abs().max() < 1e-4, name
            assert (result["resumed"] - expected[:, 1:]).abs().max() < 1e-4, name
            if "again" in result:
                assert (result["again"] - expected[:, -3:]).abs().max() < 1e-4


@pytest.mark.full
def test_compiled(tmp_path: Path) -> None:
    model = tiny_model(FAMILY)
    model.save_pretrained(tmp_path / FAMILY)
    expected = reference_logits(model, tokens(LENGTH), PROMPT)
    for one in run_ranks(tmp_path, 2, (split_checks.compiled_context,)):
        result = one["compiled_context"]
        assert isinstance(result, dict), result
        assert (result["logits"] - expected).abs().max() < 1e-4
        # Two collectives of the one full layer.
        assert [sum("all_reduce" in name for name in graph) for graph in result["graphs"]] == [2, 2]
