"""The verifier: it passes what is right, fails what is wrong in any way, and leaves everything as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.errors import InputError
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.inputs.modality import features_of
from exportable_cache.verification.compare import spread_of, verify_encoders
from exportable_cache.verification.prompts import (
    default_decode_steps,
    default_prompts,
    most_tokens,
    planned,
    prompt_feeds,
)
from exportable_cache.verification.report import VerifyReport
from exportable_cache.verification.spec import VerifySpec
from exportable_cache.verification.tolerance import default_tolerance
from exportable_cache.verification.verify import verify, verify_session

from .support.models import WINDOW, among, hybrid_model, tiny_model, tokens
from .zoo.media import media_rows, tiny_media_model
from .zoo.media_items import item

CAPACITY = 64


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model()


def session_of(model: Any, capacity: int = CAPACITY, batch_size: int = 1, **options: Any) -> Session:
    return Session.from_model(
        model, ExportableCache.from_model(model, capacity, batch_size), **{"buckets": False, **options}
    )


class Meddling:
    """A runner whose logits pass through `change(logits, last position)`."""

    def __init__(self, runner: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self.methods = runner.methods
        self._runner = runner
        self._change = change

    def run(self, method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        logits = self._runner.run(method, input_ids, input_pos)
        return self._change(logits, int(input_pos[0]) + input_ids.shape[1] - 1)


def meddled(model: Any, change: Callable[[torch.Tensor, int], torch.Tensor]) -> Session:
    session = session_of(model)
    session.runner = Meddling(session.runner, change)
    return session


def test_right_session_passes(model: Any) -> None:
    report = verify_session(session_of(model, prefill_chunk=13), model)
    assert report.passed
    assert 0 < report.max_difference < 1e-5
    assert report.tolerance == 1e-4
    assert report.windows == (WINDOW,)
    assert report.target == "eager"
    assert [(prompt.length, prompt.chunks, prompt.decode_steps) for prompt in report.prompts] == [
        (3, 1, 24), (7, 2, 24), (8, 2, 24), (9, 2, 24), (40, 4, 24), (64, 6, 0)
    ]  # fmt: skip
    assert report.steps == 5 * 25 + 1
    assert [prompt.argmax_agreement for prompt in report.prompts] == [1.0] * 6
    assert str(report) == (
        "verified: 126 positions, prompts of 3, 7, 8, 9, 40, 64 tokens, past the window of 8, "
        f"max |logit difference| {report.max_difference:.1e} <= 1e-04"
    )


def test_rows_are_compared(model: Any) -> None:
    report = verify_session(session_of(model, batch_size=2), model, prompts=[9], decode_steps=3)
    assert report.passed
    assert report.steps == 2 * 4


@pytest.mark.parametrize("row", [0, 1])
def test_one_row_that_is_wrong_fails(model: Any, row: int) -> None:
    def change(logits: torch.Tensor, at: int) -> torch.Tensor:
        logits[row, 5] += 2e-4 * (at == 4)
        return logits

    session = session_of(model, batch_size=2)
    session.runner = Meddling(session.runner, change)
    assert not verify_session(session, model, prompts=[3], decode_steps=3).passed


def test_full_attention_crosses_a_chunk() -> None:
    model = tiny_model("llama")
    report = verify_session(session_of(model, prefill_chunk=45), model, decode_steps=2)
    assert report.passed
    assert report.windows == ()
    assert [(prompt.length, prompt.chunks) for prompt in report.prompts] == [(3, 1), (8, 2), (40, 2), (48, 2), (64, 2)]


@pytest.mark.parametrize("position", among([3 - 1, 8, 9 + 23, 40 + 23], fast=[3 - 1, 40 + 23]))
def test_one_wrong_logit_anywhere_fails(model: Any, position: int) -> None:
    def change(logits: torch.Tensor, at: int) -> torch.Tensor:
        logits[0, 5] += 2e-4 * (at == position)
        return logits

    report = verify_session(meddled(model, change), model)
    assert not report.passed
    assert 1.9e-4 < report.max_difference < 2.1e-4
    assert str(report).startswith("NOT verified: 126 positions")
    assert "exceeds 1e-04" in str(report)


@pytest.mark.parametrize(("position", "value"), [(2, float("nan")), (40, float("inf"))])
def test_not_a_number_fails(model: Any, value: float, position: int) -> None:
    def change(logits: torch.Tensor, at: int) -> torch.Tensor:
        logits[0, 5] += value if at == position else 0.0
        return logits

    report = verify_session(meddled(model, change), model)
    assert not report.passed
    assert not torch.tensor(report.max_difference).isfinite()
    assert report.to_dict()["max_difference"] is None
    assert "NaN" not in json.dumps(report.to_dict())


def test_not_a_number_on_both_sides_fails() -> None:
    model = tiny_model("llama")
    session = session_of(model)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    assert not verify_session(session, model, prompts=[3], decode_steps=1).passed


def test_wrong_window_fails(model: Any) -> None:
    """A ring that is one too small is right up to the window and wrong past it."""
    cache = ExportableCache.from_model(hybrid_model(sliding_window=WINDOW - 1), CAPACITY)
    session = session_of(model)
    session.runner = ModuleRunner(model, cache)
    assert verify_session(session, model, prompts=[3], decode_steps=4).passed
    assert not verify_session(session, model, prompts=[3], decode_steps=5).passed
    assert not verify_session(session, model).passed


def test_leftovers_of_longer_prompts_are_met(model: Any) -> None:
    """Stale slots that are seen by mistake show, because prompts shrink."""
    session = session_of(model)
    lengths = []
    prefill = session.prefill
    session.prefill = lambda ids: (lengths.append(ids.shape[1]), prefill(ids))[1]
    verify_session(session, model)
    # All of a prompt is in the cache before the next one starts, and the first is the cache's own length.
    assert lengths == [64, 43, 21, 27, 13, 6, 3, 6, 2, 5, 2, 3]


def prefills_of(session: Session) -> list[tuple[int, int]]:
    """Position and size of every run of the prefill program from now on, filled as they run."""
    calls: list[tuple[int, int]] = []
    run = session.runner.run

    def note(method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        if method == "prefill":
            calls.append((int(input_pos[0]), input_ids.shape[1]))
        return run(method, input_ids, input_pos)

    session.runner.run = note
    return calls


@pytest.mark.parametrize("capacity", among([3, 4, 5, 8, 9, 64, 255, 256], fast=[3, 9, 256]))
@pytest.mark.parametrize("prefill_chunk", [None, 2, 3])
def test_prefill_runs_from_the_start_past_it_and_at_full_length(
    model: Any, capacity: int, prefill_chunk: int | None
) -> None:
    session = session_of(model, capacity, prefill_chunk=prefill_chunk)
    calls = prefills_of(session)
    report = verify_session(session, model, decode_steps=None if capacity < 64 else 0)
    assert report.passed
    assert any(position == 0 for position, _ in calls)
    assert any(position > 0 for position, _ in calls)
    assert any(position > WINDOW for position, _ in calls) or capacity < WINDOW + 3
    assert max(size for _, size in calls) == min(prefill_chunk or 256, capacity)
    assert (report.prompts[-1].length, report.prompts[-1].decode_steps) == (capacity, 0)


@pytest.mark.parametrize(("capacity", "prompts"), [(1, [1]), (2, [2]), (3, [2, 3])])
def test_caches_too_small_for_the_shortest_prompt(model: Any, capacity: int, prompts: list[int]) -> None:
    session = session_of(model, capacity)
    calls = prefills_of(session)
    report = verify_session(session, model)
    assert report.passed
    assert [prompt.length for prompt in report.prompts] == prompts
    assert bool(calls) is (capacity > 1)


def test_prefill_that_is_wrong_past_the_start_fails(model: Any) -> None:
    session = session_of(model)
    run = session.runner.run

    def forgetful(method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return run(method, input_ids, input_pos * 0 if method == "prefill" else input_pos)

    session.runner.run = forgetful
    report = verify_session(session, model)
    assert not report.passed
    assert [prompt.length for prompt in report.prompts if prompt.max_difference > 1e-2] == [7, 8, 9, 40, 64]


def test_a_whole_chunk_that_is_wrong_fails(model: Any) -> None:
    """It is fed before the two parts of the same prompt, which are right and come last."""
    session = session_of(model, prefill_chunk=16)
    run = session.runner.run

    def wrong(method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        return run(method, input_ids, input_pos) + 1.0 * (input_ids.shape[1] == 16)

    session.runner.run = wrong
    assert not verify_session(session, model, prompts=[16], decode_steps=1).passed


def test_only_the_last_slot_wrong_fails(model: Any) -> None:
    def change(logits: torch.Tensor, at: int) -> torch.Tensor:
        return logits + (at == CAPACITY - 1)

    assert not verify_session(meddled(model, change), model, decode_steps=3).passed
    assert verify_session(meddled(model, change), model, prompts=[40], decode_steps=3).passed


def test_the_edges_of_length_buckets_are_crossed() -> None:
    model = tiny_model("llama")
    report = verify_session(session_of(model, 64, buckets=[16, 32]), model, decode_steps=2)
    assert {15, 31} <= {prompt.length for prompt in report.prompts}
    assert report.passed


def test_large_caches_are_not_filled(model: Any) -> None:
    wide = session_of(tiny_model("llama", max_position_embeddings=8192), 4097)
    reference = tiny_model("llama", max_position_embeddings=8192)
    report = verify_session(wide, reference, decode_steps=0)
    assert [prompt.length for prompt in report.prompts] == [3, 8, 40, 259]
    assert report.unread == 4097 - 259 and "259 tokens, not the last 3838 slots, max" in str(report)
    limit = most_tokens(wide, reference)
    assert planned(wide, VerifySpec(decode_steps=0, full=True), limit, [])[-2:] == [(259, 0), (4097, 0)]


def test_prompts_end_with_the_model_s_positions() -> None:
    """Methods that read more slots serve no step of it."""
    model = tiny_model("llama", max_position_embeddings=300)
    session = session_of(model, 1100, buckets=True)
    assert any((method.kv_read_len or 0) > 301 for method in session.runner.methods.values())
    assert planned(session, VerifySpec(), most_tokens(session, model), [])[-1] == (300, 0)


@pytest.mark.parametrize(
    ("length", "prefill_chunk", "expected"),
    [
        (1, 256, [[1]]),
        (3, 256, [[3]]),
        (3, 3, [[3], [1, 2]]),
        (3, 2, [[3], [1, 2]]),
        (4, 256, [[2, 2]]),
        (4, 4, [[4], [2, 2]]),
        (7, 256, [[5, 2]]),
        (40, 256, [[27, 13]]),
        (40, 16, [[27, 13]]),
        (64, 64, [[64], [43, 21]]),
        (257, 256, [[257], [255, 2]]),
        (259, 256, [[256, 3]]),
        (5, 1, [[3, 2]]),
    ],
)
def test_prompt_feeds(length: int, prefill_chunk: int, expected: list[list[int]]) -> None:
    assert prompt_feeds(length, prefill_chunk) == expected
    assert {sum(parts) for parts in expected} == {length}


def test_everything_is_left_as_it_was(model: Any) -> None:
    session = session_of(model)
    before = model.config._attn_implementation
    session.prefill(tokens(5))
    verify_session(session, model, prompts=[3], decode_steps=1)
    assert model.config._attn_implementation == before
    assert not model.training
    assert session.length.tolist() == [0]


def test_same_seed_same_report(model: Any) -> None:
    session = session_of(model)
    first = verify_session(session, model, prompts=[9], decode_steps=5, seed=1)
    assert verify_session(session, model, prompts=[9], decode_steps=5, seed=1) == first
    assert verify_session(session, model, prompts=[9], decode_steps=5, seed=2).max_difference != first.max_difference


def test_report_survives_json(model: Any) -> None:
    report = verify_session(session_of(model), model, prompts=[9], decode_steps=5)
    assert VerifyReport(**json.loads(json.dumps(report.to_dict()))) == report


def test_progress_counts_every_step(model: Any) -> None:
    calls: list[tuple[str, int, int | None]] = []
    verify_session(session_of(model), model, prompts=[9], decode_steps=5, progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(1, 13))
    assert {(stage, total) for stage, _, total in calls} == {("verifying", 12)}


@pytest.mark.parametrize(
    "family", among(["llama", "gemma3_text", "qwen3", "phi3", "olmo3"], fast=["llama", "gemma3_text"])
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tolerance_follows_the_dtype_and_the_size_of_the_logits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    report = verify_session(session_of(model), model, prompts=[3, 20], decode_steps=20)
    assert report.passed
    least, most = {torch.float32: (1e-4, 1e-4), torch.float16: (5e-3, 2e-2), torch.bfloat16: (5e-2, 0.15)}[dtype]
    assert least <= report.tolerance <= most


def test_default_tolerance() -> None:
    assert default_tolerance(torch.float32, 30.0) == 1e-4
    assert default_tolerance(torch.bfloat16, 1.0) == 5e-2
    assert default_tolerance(torch.bfloat16, 16.0) == pytest.approx(0.5)
    assert default_tolerance(torch.float16, float("nan")) == 5e-3
    assert default_tolerance(torch.float32, 30.0, spread=2.0) == 1e-4
    assert default_tolerance(torch.float32, 600.0, spread=40.0) == pytest.approx(1.6e-3)
    assert default_tolerance(torch.float32, 30.0, spread=float("inf")) == 1e-4


def test_tolerance_follows_the_dtype_that_inputs_are_rounded_to(model: Any) -> None:
    session = session_of(model)
    report = verify_session(session, model, prompts=[4], rounded=torch.bfloat16)
    assert report.tolerance >= 5e-2 and verify_session(session, model, prompts=[4]).tolerance == 1e-4


def test_tolerance_grows_with_the_spread_of_the_logits_and_refuses_another_model() -> None:
    """Rounding in float32 grows with the logits: a head that is 100 times as large differs by 100 times as much."""
    model = tiny_model("llama", tie_word_embeddings=False)
    plain = verify_session(session_of(model), model, prompts=[9], decode_steps=5)
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    session = session_of(model)
    large = verify_session(session, model, prompts=[9], decode_steps=5)
    assert plain.tolerance == 1e-4 and large.passed
    assert large.spread == pytest.approx(100 * plain.spread, rel=1e-3)
    assert large.tolerance == pytest.approx(4e-5 * large.spread)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(1.001)
    assert not verify_session(session, other, prompts=[9], decode_steps=5).passed


def test_spread_leaves_out_tokens_that_are_never_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, float("-inf")], [0.0, 0.0, 0.0]])
    assert spread_of(logits) == 1.0


def test_given_tolerance_decides(model: Any) -> None:
    session = session_of(model)
    assert verify_session(session, model, prompts=[40], tolerance=1e-5).passed
    assert not verify_session(session, model, prompts=[40], tolerance=1e-9).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [60], "decode_steps": 5}, "at most 64 tokens, got 60 and 5"),
        ({"prompts": [0]}, "got 0 and 24"),
        ({"decode_steps": -1}, "got 3 and -1"),
        ({"tolerance": 0.0}, "tolerance must be above 0, got 0.0"),
        ({"tolerance": float("nan")}, "tolerance must be above 0, got nan"),
        ({"seed": 10**23 - 1}, f"seed must be an int from .* to .*, got {10**23 - 1}"),
    ],
)
def test_out_of_range_is_refused(model: Any, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        verify_session(session_of(model), model, **options)


def test_seed_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seed must be .*got 99999999999999999999999"):
        verify(tmp_path / "no bundle", tmp_path / "no model", seed=10**23 - 1)


def test_another_vocabulary_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="vocabulary of 128 tokens, the model of 200"):
        verify_session(session_of(model), hybrid_model(vocab_size=200))


@pytest.mark.parametrize(
    ("windows", "max_length", "prefill_chunk", "expected"),
    [
        ([8], 64, 256, [3, 7, 8, 9, 40]),
        ([8], 64, 16, [3, 7, 8, 9, 40]),
        ([8], 41, 16, [3, 7, 8, 9, 40]),
        ([8], 40, 16, [3, 7, 8, 9]),
        ([8], None, 256, [3, 7, 8, 9, 40, 259]),
        ([], 1024, 256, [3, 8, 40, 259]),
        ([], 1024, 16, [3, 8, 40]),
        ([8, 32], 512, 64, [3, 7, 8, 9, 31, 32, 33, 40, 160]),
        ([4096], 8192, 256, [3, 8, 40, 4095, 4097]),
        ([1], 64, 2, [1, 2, 3, 5]),
        ([], 3, 3, [2]),
        ([], 2, 2, [2]),
        ([], 1, 1, [1]),
    ],
)
def test_default_prompts(windows: list[int], max_length: int | None, prefill_chunk: int, expected: list[int]) -> None:
    assert default_prompts(windows, max_length, prefill_chunk) == expected


@pytest.mark.parametrize(
    ("prompt", "windows", "max_length", "expected"),
    [
        (3, [8], 64, 24),
        (3, [100], None, 107),
        (99, [100], None, 24),
        (3, [4096], None, 24),
        (50, [8], 64, 14),
        (1, [], 1, 0),
    ],
)
def test_default_decode_steps(prompt: int, windows: list[int], max_length: int | None, expected: int) -> None:
    assert default_decode_steps(prompt, windows, max_length) == expected
    # Past the window by more than eight positions, where it is small and there is room.
    if max_length is None and windows[0] <= 256:
        assert prompt + expected - 1 > windows[0] + 8


def test_positions_stop_where_the_models_do() -> None:
    model = tiny_model("llama", max_position_embeddings=30)
    report = verify_session(session_of(model), model)
    assert [(prompt.length, prompt.decode_steps) for prompt in report.prompts] == [(3, 24), (8, 22), (30, 0)]


@pytest.mark.parametrize(("share", "passes"), [(2e-6, True), (2e-5, False)])
def test_features_of_an_encoder_may_differ_by_a_share_of_their_spread(share: float, passes: bool) -> None:
    """Features of Cohere 2 Vision reach 130 in a tiny model, where two computations in float32 differ by 4e-4."""
    model = tiny_media_model(next(row for row in media_rows() if row.model_type == "cohere2_vision"))
    example = {"image": item(model, "image")}
    (modality,) = modalities_of(model, example)

    def run(method: str, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        features = features_of(model, modality, pixels)
        return (features + share * features.abs().max(),)

    runner = SimpleNamespace(methods={modality.method.name: modality.method}, run=run)
    session = SimpleNamespace(runner=runner, device=torch.device("cpu"))
    (found,) = verify_encoders(session, model, torch.Generator().manual_seed(0))
    assert found.passed is passes and found.max_difference > 1e-4, found
