"""The checks of `extended`: that rows pass them, that they notice faults, and that a tie is told from a fault."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session

from .architectures import architectures
from .build import cached_logits, forward, tiny_model, tokens
from .check import COLUMNS, ORDER, PEER_DEVICES, PEERS, TARGETS, check, write_json
from .conditioning import is_sound, model_without_choices, movement, nudged
from .extended import LENGTHS, Extended, Finding
from .table import write_table
from .test_zoo import row_of

EVERY = {
    *(f"prompt of {length}" for length in LENGTHS),
    *("second sequence", "fork", "1 taken back", "4 taken back", "float32", "bfloat16", "float16", "sizes"),
}


def findings(model_type: str) -> dict[str, Finding]:
    return Extended(row_of(model_type), tiny_model(row_of(model_type))).findings()


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["mistral", "gemma3n_text", "deepseek_v3", "whisper", "openai-gpt"])
def test_rows_pass(model_type: str) -> None:
    found = findings(model_type)
    assert set(found) == EVERY
    assert {name for name, finding in found.items() if finding.status != "pass"} == set(), found


@pytest.mark.full
def test_what_a_state_cannot_take_back_is_refused() -> None:
    found = findings("mamba2")
    refused = {name for name, finding in found.items() if finding.status == "refused"}
    assert refused == {"1 taken back", "4 taken back"}
    assert "sums up all tokens" in found["1 taken back"].reason
    assert {found[name].status for name in EVERY - refused} == {"pass"}


def _no_rewind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "rewind", lambda session, tokens: None)


def _rewind_by_one_less(patch: pytest.MonkeyPatch) -> None:
    real = Session.rewind
    patch.setattr(Session, "rewind", lambda session, tokens: real(session, tokens - 1))


def _fork_of_itself(patch: pytest.MonkeyPatch) -> None:
    """Its cache is the one that the other goes on with."""
    patch.setattr(Session, "fork", lambda session: copy.copy(session))


def _no_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "reset", lambda session: None)


def _larger_layers(patch: pytest.MonkeyPatch) -> None:
    real = ExportableCache.from_config.__func__  # type: ignore[attr-defined]
    made = classmethod(lambda cls, config, length, *args, **options: real(cls, config, length + 1, *args, **options))
    patch.setattr(ExportableCache, "from_config", made)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "noticed"),
    [
        (_no_rewind, {"1 taken back", "4 taken back"}),
        (_rewind_by_one_less, {"1 taken back", "4 taken back"}),
        (_fork_of_itself, {"fork"}),
        (_larger_layers, {"sizes"}),
    ],
)
def test_a_planted_fault_is_noticed(plant: Any, noticed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Extended(row_of("gemma2"), tiny_model(row_of("gemma2")))
    plant(monkeypatch)
    found = checks.findings()
    assert {name for name, finding in found.items() if finding.status in ("wrong", "error")} == noticed, found


@pytest.mark.full
def test_a_session_that_does_not_start_anew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Extended(row_of("gemma2"), tiny_model(row_of("gemma2")))
    _no_reset(monkeypatch)
    assert checks.findings()["second sequence"].status != "pass"


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_that_lose_three_bits_are_noticed_in_half_precision(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from exportable_cache.cache.storage import FloatStorage

    checks = Extended(row_of("mistral"), tiny_model(row_of("mistral")))
    real = FloatStorage.encode

    def coarser(storage: FloatStorage, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step = 8 * torch.finfo(states[0].dtype).eps
        return tuple((one.float() / step / 4).round().mul(step * 4).to(one.dtype) for one in real(storage, *states))

    monkeypatch.setattr(FloatStorage, "encode", coarser)
    assert checks.findings()[dtype].status == "wrong"


def test_nudged_weights_move_by_their_last_bit_each() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny_model(row_of("llama")).to(dtype)
        for before, after in zip(model.parameters(), nudged(model, 0).parameters(), strict=True):
            changed = (after.double() / before.double() - 1).abs()
            # Below the smallest normal number of float16 a unit is a larger part.
            normal = before.abs() >= torch.finfo(dtype).smallest_normal
            assert (changed[normal] > 0).all()
            assert (changed[normal] <= 1.01 * torch.finfo(dtype).eps).all()


def test_a_tie_is_no_sound_reference() -> None:
    """Two experts that are as good as each other, of which one is taken."""
    row = row_of("mixtral")
    model, ids = tiny_model(row), tokens(length=35)

    def reference_of(one: Any) -> torch.Tensor:
        return cached_logits(one, ids, 11)

    assert is_sound(torch.float32, reference_of(model), movement(model, reference_of))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(parameter[:1].expand_as(parameter))
    assert not is_sound(torch.float32, reference_of(model), movement(model, reference_of))


def test_a_model_without_choices_takes_every_expert_and_key() -> None:
    assert model_without_choices(row_of("mixtral")).config.num_experts_per_tok == 4
    indexed = model_without_choices(row_of("glm_moe_dsa")).config
    assert indexed.index_topk >= 59 and indexed.num_experts_per_tok == indexed.n_routed_experts
    with pytest.raises(ValueError, match="causal-llama: no field of its config"):
        model_without_choices(row_of("llama"))


def test_half_of_the_cells_are_run_before_patches_are_in() -> None:
    assert sorted(ORDER) == sorted((*COLUMNS, *PEER_DEVICES))
    assert ORDER[: len(PEERS)] == PEERS and ORDER[-len(TARGETS) :] == TARGETS


@pytest.mark.full
def test_peers_are_run_by_the_same_script() -> None:
    facts: dict[str, Any] = {}
    check(row_of("llama"), list(PEERS), facts.update)
    assert {name: found["status"] for name, found in facts["targets"].items()} == dict.fromkeys(PEERS, "pass"), facts
    # A prompt in two pieces, over states that start anew with the second.
    check(row_of("jamba"), ["static_cache"], facts.update)
    assert facts["targets"]["static_cache"]["status"] == "wrong"
    assert re.search(r"6: \de-0[67],.*5 \+ 6: \de-0[01]", facts["targets"]["static_cache"]["reason"])


def test_the_table_names_where_a_peer_is_ahead(tmp_path: Path) -> None:
    first, second = architectures()[:2]
    passed = {"status": "pass", "difference": 1e-6, "reason": "", "seconds": 1.0}
    refused = {**passed, "status": "refused", "difference": None, "reason": "no place for it"}
    checks = {"fork": {"status": "pass", "reason": ""}, "sizes": {"status": "refused", "reason": "layer 3 says 12"}}
    targets = {"eager": refused, "static_cache": passed, "extended": passed}
    write_json(tmp_path / f"{first.name}.json", {"targets": targets, "checks": checks})
    write_json(tmp_path / f"{second.name}.json", {"targets": {"eager": passed, "static_cache": passed}})
    write_table(tmp_path, tmp_path / "table.md")
    written = (tmp_path / "table.md").read_text()
    assert f"Rows that a peer passes and a target here does not: {first.name} (eager)." in written
    assert "- sizes, 1: layer N says N" in written
    assert "| 1, 1 refused |" in written


def test_the_table_sums_up_processor_minutes(tmp_path: Path) -> None:
    """Results from before they were told are counted out."""
    first, second = architectures()[:2]
    told = {"status": "pass", "difference": 1e-6, "reason": "", "seconds": 600.0, "processor_seconds": 240.0}
    before = {name: value for name, value in told.items() if name != "processor_seconds"}
    made = {"model processor seconds": 60.0}
    write_json(tmp_path / f"{first.name}.json", {"targets": {"eager": told, "pt2": told}, **made})
    write_json(tmp_path / f"{second.name}.json", {"targets": {"eager": before, "pt2": told, "compiled": before}})
    write_table(tmp_path, tmp_path / "table.md")
    written = (tmp_path / "table.md").read_text()
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[-2:] for line in written.splitlines() if line.startswith("| ")}
    assert [cells[name] for name in ("eager", "pt2", "compiled")] == [
        ["20", "4 (1 rows) |"],
        ["20", "8 |"],
        ["10", " |"],
    ]
    assert "not every row tells them yet, 1 (1 rows) of them for models" in written


def test_logits_of_codebooks_are_those_of_each() -> None:
    """As many as a prompt of any length asks for."""
    model = tiny_model(row_of("musicgen"))
    ids = tokens(model, length=5)
    assert ids.shape[:2] == (1, 5) and forward(model, ids, {}).shape[0] == 5
