"""Verification of large models: one sequence of which all prompts are beginnings, and the program opened after it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends.live.runner import ModuleRunner
from exportable_cache.backends.registry import TARGETS
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.models.quantized_rows import has_quantized_weights
from exportable_cache.verification import compare as comparing
from exportable_cache.verification import prompts, references
from exportable_cache.verification.compare import compare, measure_distance
from exportable_cache.verification.measures import short_prompts
from exportable_cache.verification.prompts import END_STEPS, read_and_placed
from exportable_cache.verification.references import (
    RoundingCache,
    logits_by_step,
    logits_of_beginnings,
    plain_cache,
)
from exportable_cache.verification.report import FedPrompt, VerifyReport
from exportable_cache.verification.verify import verify, verify_session

from .support import fake_target
from .support.kinds import KINDS
from .support.models import WINDOW, tiny_model, tokens

CAPACITY = 64


def test_the_reference_comes_first_and_a_program_of_other_weights_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("executorch", reason="the executorch extra is not installed")
    monkeypatch.setattr(references, "MOST_PARAMETERS", 0)
    events = []
    reference, opened = references.logits_of_beginnings, Bundle.open_runner

    def logits_of_beginnings(*given):
        events.append("reference")
        return reference(*given)

    def open_runner(bundle):
        events.append("program")
        return opened(bundle)

    monkeypatch.setattr(references, "logits_of_beginnings", logits_of_beginnings)
    monkeypatch.setattr(Bundle, "open_runner", open_runner)
    monkeypatch.setattr(prompts, "_MOST_PRODUCTS", 0)
    model = tiny_model("llama", hidden_size=64, num_hidden_layers=1, max_position_embeddings=LONG)
    bundle = export(model, "executorch", LONG, tmp_path / "out", prefill_chunk=16, kv_dtype="int8")
    recorded = bundle.manifest.verification
    assert recorded["at_once"] and recorded["passed"] and recorded["unread"] == 0
    # After the prompts that are read, also over keys and values that are placed in the program's memory.
    assert [prompt["placed"] for prompt in recorded["prompts"]] == [0, 0, 0, LONG - 64 - 52]
    assert "of 3, 8, 36 tokens, up to 160 over placed keys, max" in str(VerifyReport.recorded(recorded))
    assert events == 2 * ["reference"] + ["program"] + 4 * ["reference"]
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[0] += 0.1
    report = verify(bundle, model)
    assert report.at_once and not report.passed


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large."""
    monkeypatch.setattr(references, "MOST_PARAMETERS", 0)


def session_of(model: Any, reference: Any = None, **options: Any) -> Session:
    """Return a session over `model` whose layers are those of `reference`."""
    cache = ExportableCache.from_model(reference or model, CAPACITY, **options)
    return Session.from_model(model, cache, buckets=False, prefill_chunk=16)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("quantize", ["8da8w", None])
def test_each_model_runs_once_and_the_program_only_to_be_verified(
    quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three distances: from the quantised model, from the float model, and from an exact cache."""
    if quantize is not None:
        pytest.importorskip("torchao", reason="the executorch extra is not installed")
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    monkeypatch.setattr(fake_target.FakeBackend, "linear_schemes", ("8da8w",), raising=False)
    passes, fed = [], []
    reference, run = comparing.logits_of_beginnings, fake_target.FakeRunner.run

    def logits_of_beginnings(model, ids, plan, sinks=None, cache=None, start=0):
        passes.append((has_quantized_weights(model), ids.shape[1] - start, isinstance(cache, RoundingCache)))
        return reference(model, ids, plan, sinks, cache, start)

    def counted_run(runner, method, ids, *rest):
        fed.append(ids.shape[1])
        return run(runner, method, ids, *rest)

    def stepwise(*given):
        raise AssertionError("the reference ran in single steps")

    for module in (comparing, references):
        monkeypatch.setattr(module, "logits_of_beginnings", logits_of_beginnings)
        monkeypatch.setattr(module, "logits_by_step", stepwise)
    monkeypatch.setattr(references, "logits_over", stepwise)
    monkeypatch.setattr(fake_target.FakeRunner, "run", counted_run)
    # Sizes by which 32 weights share a scale.
    model = tiny_model("gemma3_text", hidden_size=64, head_dim=32, intermediate_size=64)
    bundle = export(model, "fake", CAPACITY, tmp_path / "x", prefill_chunk=16, kv_dtype="int8", quantize=quantize)
    manifest = bundle.manifest
    prompts = [3, 7, 8, 9, 40, 64]
    assert [prompt["length"] for prompt in manifest.verification["prompts"]] == prompts
    assert manifest.verification["at_once"]
    # 64 tokens once with the program's rounding and once without; 40 tokens and 8 steps of the float model.
    others = [(False, 48, False)] if quantize else []
    assert passes == [(quantize is not None, 64, True), (quantize is not None, 64, False), *others]
    steps = 5 * 24
    # Each prompt once, with stale tokens of another text before all except the longest, and nothing for the distances.
    assert sum(fed) == sum(prompts) + sum(length + 24 for length in prompts[:-1]) + steps
    assert manifest.verification["steps"] == steps + len(prompts)
    distances = [manifest.kv_cache] if quantize is None else [manifest.kv_cache, manifest.quantization]
    # After each of the five prompts, and after 8 tokens that follow it.
    assert [distance.positions for distance in distances] == [5 * 9] * len(distances)
    assert all(1e-5 < distance.max_difference < 1 for distance in distances)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"attention_sinks": 2, "attention_window": 8}])
def test_one_pass_gives_what_single_steps_give(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk that ends inside what sinks keep, and many past it.
    monkeypatch.setattr(references, "_CHUNK", 6)
    model = tiny_model("llama" if "attention_sinks" in options else "gemma3_text")
    session = session_of(model, **options)
    storage, sinks = comparing.rounding_storage(session.layers), comparing.kept_sinks(session)
    ids = tokens(30)
    at_once = logits_of_beginnings(model, ids, [(3, 0), (9, 4), (20, 10)], sinks, plain_cache(model, sinks, storage))
    assert sorted(at_once) == [2, *range(8, 13), *range(19, 30)]
    for length, steps in ((3, 0), (9, 4), (20, 10)):
        expected = logits_by_step(model, ids[:, : length + steps], length, sinks, None, storage)
        for position, logits in enumerate(expected, length - 1):
            assert torch.equal(at_once[position].argmax(-1), logits.argmax(-1))
            # A key in the middle of two 8-bit steps may round the other way.
            assert (at_once[position] - logits).abs().max() < (2e-2 if storage else 1e-5)
    assert verify_session(session, model).at_once


@pytest.mark.usefixtures("large")
def test_distances_are_those_that_single_steps_measure() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", rms_norm_eps=1e-3)
    session, fed = session_of(model), []
    assert compare(session, model, fed=fed).passed
    few = short_prompts(fed)
    assert [prompt.length for prompt in few] == [3, 8, 40] and [prompt.length for prompt in fed][0] == CAPACITY
    alone = [FedPrompt(one.length, one.ids, one.sinks, one.encoder_inputs, one.logits) for one in few]
    at_once, by_step = measure_distance(other, few), measure_distance(other, alone)
    assert at_once.positions == by_step.positions == 3 * 9
    assert at_once.max_difference == pytest.approx(by_step.max_difference, abs=1e-5)
    assert at_once.max_difference > 1e-3


def rotated_past(model: Any, border: int) -> Any:
    """Return a copy of a model that rotates keys and queries past a border as at another position."""
    changed = copy.deepcopy(model)
    rotary = changed.model.rotary_emb.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return rotary(x, position_ids + (position_ids > border).long(), *rest, **more)

    changed.model.rotary_emb.forward = forward
    return changed


LONG, LONG_WINDOW = 160, 40


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    """Every model is so large that only the shortest prompts are read."""
    monkeypatch.setattr(prompts, "_MOST_PRODUCTS", 0)


def long_session(model: Any, reference: Any = None, **options: Any) -> Session:
    cache = ExportableCache.from_model(reference or model, LONG, **options)
    return Session.from_model(model, cache, buckets=False, prefill_chunk=16)


def hybrid(**options: Any) -> Any:
    return tiny_model("gemma3_text", sliding_window=LONG_WINDOW, **options)


@pytest.mark.usefixtures("costly")
def test_few_tokens_are_read_and_every_border_and_the_last_slot_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = hybrid(), []
    reference = references.logits_of_beginnings

    def logits_of_beginnings(*given):
        passes.append(given[1].shape[1] - given[-1])
        return reference(*given)

    monkeypatch.setattr(references, "logits_of_beginnings", logits_of_beginnings)
    session = long_session(model, kv_dtype="int8")
    steps, run = [], session.runner.run
    monkeypatch.setattr(session.runner, "run", lambda *given: steps.append(given[1].shape[1]) or run(*given))
    report = verify_session(session, model)
    assert report.passed, str(report)
    # Each reference reads 3 tokens and 47 steps past the window, 3 more for the prompt of 41, and 64 before the end.
    assert passes == [50, 50, 3, 3, 64, 64]
    # So does the program. Over rings, it cannot take tokens back to read them again.
    assert sum(steps) == 50 + 3 + 64
    found = [(prompt.length, prompt.decode_steps, prompt.placed) for prompt in report.prompts]
    assert found == [(3, 47, 0), (53, 0, 0), (LONG - 16, 16, LONG - 64 - 53)]
    assert report.unread == 0 and report.windows == (LONG_WINDOW,)
    assert "prompts of 3, 53 tokens, up to 160 over placed keys, past the window of 40, " in str(report)
    # Of the tokens before an end, the first and the last prompt and the steps between.
    assert report.steps == 48 + 1 + (2 + 8)
    passes.clear()
    whole = verify_session(session, model, full=True)
    assert whole.passed and passes == [LONG, LONG]
    assert not any(prompt.placed for prompt in whole.prompts) and max(one.length for one in whole.prompts) == LONG


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize(
    ("kind", "options", "is_placed"),
    [
        ("llama", {}, True),
        ("llama", {"kv_dtype": "int4"}, True),
        # Rings of chunks, layers without keys, and states of fixed size, which stay as the tokens before left them.
        ("llama4_text", {}, True),
        ("gemma3n_text", {"kv_dtype": "int8"}, True),
        ("lfm2", {}, True),
        ("falcon_h1", {}, True),
        # What indexers and sinks keep is read.
        ("deepseek_v32", {}, False),
        ("llama", {"attention_sinks": 2, "attention_window": 100}, False),
    ],
)
def test_the_last_slots_are_reached_with_and_without_placed_keys(
    kind: str, options: dict[str, Any], is_placed: bool
) -> None:
    fields, _ = KINDS.get(kind, ({}, []))
    model = tiny_model(kind, **fields, max_position_embeddings=LONG)
    report = verify_session(long_session(model, **options), model)
    assert report.passed, str(report)
    assert any(prompt.placed for prompt in report.prompts) is is_placed
    assert report.unread == 0
    if "attention_sinks" not in options:
        assert max(prompt.length + prompt.decode_steps for prompt in report.prompts) == LONG


def test_single_steps_lead_past_each_border() -> None:
    """The method that reads 512 slots takes the step that reads the last of them."""
    plan = [(3, 24), (259, 24), (511, 24), (1023, 24), (2048, 0)]
    read, ends = read_and_placed(plan, 256, 10**10, 2048, 2048)
    assert read == plan[:2] and ends[-1] == 2048
    for end, border in zip(ends, (512, 1024), strict=False):
        first = end - 2 * END_STEPS
        assert first < border < first + END_STEPS - 1


def narrow_mask(model: Any, **options: Any) -> Session:
    """Return a session whose queries see one key less past the window."""
    changed = copy.deepcopy(model)
    session = long_session(changed, **options)
    changed.config.sliding_window -= 1
    return session


def lost_slot(model: Any, **options: Any) -> Session:
    """Return a session that loses a key before the end."""
    session = long_session(model, **options)
    run = session.runner.run

    def forgetting(*given: Any) -> Any:
        for name, tensor in session.runner.state.items():
            if name.endswith(("keys", "values")) and tensor.shape[2] == LONG:
                tensor[:, :, LONG - 10] = 0
        return run(*given)

    session.runner.run = forgetting
    return session


def wrong_end(border: int):
    """Return `wrong_rotary` for a long session."""
    return lambda model, **options: long_session(rotated_past(model, border), model, **options)


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("fault", [narrow_mask, lost_slot, wrong_end(LONG - 2), wrong_end(120)])
def test_faults_of_slots_that_no_token_filled_are_found(fault: Any) -> None:
    # Small windows are passed by steps, and larger ones over placed keys.
    model = hybrid(max_position_embeddings=LONG)
    report = verify_session(fault(model), model)
    first, last = report.prompts[0], report.prompts[-1]
    assert not report.passed and last.placed and last.max_difference > report.tolerance
    assert (first.max_difference <= report.tolerance) is (fault is not narrow_mask)


def one_slot_too_few(model: Any, **options: Any) -> Session:
    """Return a session whose mask is off by one past the window."""
    session = session_of(model, **options)
    narrow = tiny_model("gemma3_text", sliding_window=WINDOW - 1)
    session.runner = ModuleRunner(model, ExportableCache.from_model(narrow, CAPACITY, **options))
    return session


def wrong_scale(model: Any, **options: Any) -> Session:
    """Return a session whose last layer's output has a wrong scale, as one group of quantised weights would."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[-1].self_attn.o_proj.weight[:4] *= 1.5
    return session_of(changed, model, **options)


def wrong_rotary(border: int):
    """Return a function to a session over `rotated_past`."""
    return lambda model, **options: session_of(rotated_past(model, border), model, **options)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}])
def test_a_right_program_passes(options: dict[str, Any]) -> None:
    model = tiny_model("gemma3_text")
    assert verify_session(session_of(model, **options), model).passed


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}])
@pytest.mark.parametrize(
    ("faulty", "right"),
    [
        # Steps of several tokens read their own keys.
        (one_slot_too_few, [CAPACITY]),
        (wrong_scale, []),
        (wrong_rotary(20), []),
        # Only the prompt that fills the cache gets there.
        (wrong_rotary(CAPACITY - 6), [3, 7, 8, 9]),
    ],
)
def test_faults_are_found(faulty: Any, right: list[int], options: dict[str, Any]) -> None:
    model = tiny_model("gemma3_text")
    report = verify_session(faulty(model, **options), model)
    assert report.at_once and not report.passed
    assert {prompt.length for prompt in report.prompts if prompt.max_difference <= report.tolerance} >= set(right)
