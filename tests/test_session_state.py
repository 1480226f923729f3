"""Saved prefixes continue on any target, forks go their own way, and what does not fit is refused whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import BundleError, InputError
from exportable_cache.models.weights import fingerprint

from .support.models import tiny_model, tokens
from .support.oracle import reference_logits
from .support.sessions import live_session, lowered_session

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("gemma3_text")


def open_session(model: Any, kind: str) -> Session:
    if kind in ("eager", "compiled"):
        return live_session(model, kind == "compiled", 64)
    target, _, form = kind.partition("-")
    options = {"form": form} if form == "explicit" else {}
    session = lowered_session(model, target, **options)
    session.fingerprint = fingerprint(model)
    return session


@pytest.mark.parametrize("kind", ["eager", "pt2-resident", "pt2-explicit"])
@pytest.mark.parametrize("length", [5, 20])
def test_a_prefix_saved_in_eager_continues_elsewhere(model: Any, tmp_path: Path, kind: str, length: int) -> None:
    ids = tokens(length + 12)
    reference = reference_logits(model, ids, length)[0]
    first = live_session(model, False, 64)
    first.prefill(ids[:, :length])
    first.save_state(tmp_path / "prefix.safetensors")
    second = open_session(model, kind)
    second.prefill(tokens(9, seed=3))
    second.load_state(tmp_path / "prefix.safetensors")
    assert second.length.tolist() == [length]
    for step in range(12):
        logits = second.decode(ids[0, length + step : length + step + 1])
        assert (logits[0] - reference[step + 1]).abs().max() <= TOLERANCE


def test_a_prefix_saved_by_a_program_continues_in_eager(model: Any, tmp_path: Path) -> None:
    ids = tokens(30)
    first = open_session(model, "pt2-explicit")
    first.prefill(ids[:, :20])
    first.save_state(tmp_path / "prefix.safetensors")
    second = live_session(model, False, 64)
    second.load_state(tmp_path / "prefix.safetensors")
    torch.testing.assert_close(
        second.prefill(ids[:, 20:])[0], reference_logits(model, ids, 30)[0, 0], atol=TOLERANCE, rtol=0
    )


def test_the_file_is_as_large_as_what_it_holds(tmp_path: Path) -> None:
    model = tiny_model("llama")
    session = live_session(model, False, 4096)
    session.prefill(tokens(10))
    session.save_state(tmp_path / "prefix.safetensors")
    slots = 2 * 2 * 2 * 10 * 8 * 4  # layers, keys and values, heads, slots, head_dim, bytes
    assert slots < (tmp_path / "prefix.safetensors").stat().st_size < slots + 2000


def test_rewind_after_loading_knows_what_was_overwritten(model: Any, tmp_path: Path) -> None:
    first = live_session(model, False, 64)
    first.prefill(tokens(20))
    first.save_state(tmp_path / "prefix.safetensors")
    second = live_session(model, False, 64)
    second.load_state(tmp_path / "prefix.safetensors")
    with pytest.raises(InputError, match="at most 1 can be taken back"):
        second.rewind(2)


def refused(session: Session, path: Path, match: str, error: type = InputError) -> None:
    session.prefill(tokens(4, seed=5))
    before = {name: tensor.clone() for name, tensor in session.runner.state.items()}
    with pytest.raises(error, match=match):
        session.load_state(path)
    assert session.length.tolist() == [4]
    for name, tensor in session.runner.state.items():
        assert torch.equal(tensor, before[name])


def test_what_does_not_fit_is_refused_and_changes_nothing(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "prefix.safetensors"
    session = live_session(model, False, 64)
    session.prefill(tokens(20))
    session.save_state(path)
    refused(live_session(model, False, 16), path, "holds 20 tokens, this cache at most 16")
    other = tiny_model("gemma3_text")
    with torch.no_grad():
        other.model.norm.weight.add_(0.5)
    refused(live_session(other, False, 64), path, "must have the weights of this session's model")
    cache = ExportableCache.from_model(model, 64, rollback_slots=3)
    refused(
        Session.from_model(model, cache),
        path,
        "other layers than this session: layer 0 is .*'rollback_slots': 0.*'rollback_slots': 3",
    )
    refused(live_session(model, False, 64), tmp_path / "none", "cannot read a session's state", BundleError)
    path.write_bytes(path.read_bytes()[:500])
    refused(live_session(model, False, 64), path, "cannot read a session's state", BundleError)
    session.cache.save(path)
    refused(live_session(model, False, 64), path, "was not written by save_state", BundleError)


def test_a_runtime_that_keeps_its_cache_says_so(model: Any, tmp_path: Path) -> None:
    session = live_session(model, False, 64)
    session.runner.state = None
    session.target = "executorch"
    with pytest.raises(InputError, match="the 'executorch' runtime does not give out its cache"):
        session.save_state(tmp_path / "prefix.safetensors")
    with pytest.raises(InputError, match="use an eager or compiled session, or target pt2 or aoti"):
        session.fork()
    assert not (tmp_path / "prefix.safetensors").exists()


@pytest.mark.parametrize("kind", ["eager", "pt2-explicit"])
def test_forks_go_their_own_way(model: Any, kind: str) -> None:
    """Three continuations of one prefix, stepped in turns, each equal to the model on its own tokens."""
    prefix = tokens(13)
    session = open_session(model, kind)
    session.prefill(prefix)
    sessions = [session, session.fork()]
    sessions.append(sessions[1].fork())
    ids = [torch.cat([prefix, tokens(10, seed=seed)], dim=1) for seed in range(3)]
    references = [reference_logits(model, row, 13)[0] for row in ids]
    for step in range(10):
        for fork, row, reference in zip(sessions, ids, references, strict=True):
            logits = fork.decode(row[0, 13 + step : 14 + step])
            assert (logits[0] - reference[step + 1]).abs().max() <= TOLERANCE
    sessions[1].reset()
    assert [fork.length.tolist() for fork in sessions] == [[23], [0], [23]]


def test_a_reset_leaves_no_trace_of_not_a_number(model: Any) -> None:
    session = open_session(model, "pt2-resident")
    for tensor in session.runner.state.values():
        tensor.fill_(torch.nan)
    session.reset()
    assert torch.isfinite(session.prefill(tokens(5))).all()


def test_fingerprints_differ_by_weights_and_dtype(model: Any) -> None:
    assert fingerprint(model) == fingerprint(tiny_model("gemma3_text"))
    assert fingerprint(model) != fingerprint(tiny_model("gemma3_text", dtype=torch.bfloat16))
    other = tiny_model("gemma3_text")
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    assert fingerprint(model) != fingerprint(other)


def test_a_fork_has_no_cache_object(model: Any) -> None:
    session = live_session(model, False, 64)
    session.prefill(tokens(3))
    fork = session.fork()
    with pytest.raises(InputError, match="a fork has no cache object: .* save_state"):
        _ = fork.cache
    assert session.cache.cumulative_length.tolist() == [3]
