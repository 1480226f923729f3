"""Bench on a live session, with a clock that ticks one millisecond per reading."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError
from exportable_cache.pipeline import bench as module
from exportable_cache.pipeline.bench import bench, bench_rows, peak_rss_bytes
from exportable_cache.program.inputs.kinds import text_after
from exportable_cache.session.native import NativeSession

from .support.models import VOCAB, tiny_model
from .support.multimodal import PLACEHOLDER, tiny_multimodal
from .support.seq2seq import tiny_seq2seq

LIMIT = 64


@pytest.fixture
def ticking(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks) / 1000)


class Recorder:
    """A session's runner that notes each call before passing it on."""

    def __init__(self, runner):
        self._runner, self.methods, self.calls = runner, runner.methods, []

    def run(self, method, input_ids, input_pos):
        self.calls.append((method, tuple(input_ids.shape), input_pos.tolist()))
        return self._runner.run(method, input_ids, input_pos)


def session_of(family="gemma2", batch_size=1):
    model = tiny_model(family)
    session = Session.from_model(model, ExportableCache.from_model(model, LIMIT, batch_size), prefill_chunk=16)
    session.runner = Recorder(session.runner)
    return session


def test_bench_turns_seconds_into_rates(ticking):
    report = bench(session_of(batch_size=2), positions=[0, 20], steps=4, prompt_length=16)
    assert report.prefill_tokens_per_second == pytest.approx(2 * 16 / 0.001)
    assert [(row.position, row.steps) for row in report.decode] == [(0, 4), (20, 4)]
    assert [(row.median_ms, row.p90_ms) for row in report.decode] == [(pytest.approx(1.0), pytest.approx(1.0))] * 2
    assert (report.batch_size, report.prompt_length) == (2, 16)


def fields_of(methods):
    return SimpleNamespace(fields={"program": {"methods": methods}})


def test_bench_draws_no_placeholders_of_images():
    """They stand for images that a random prompt does not have, so a session refuses them."""
    model = tiny_multimodal("llava")
    cache = ExportableCache.from_model(model, 2 * VOCAB)
    session = Session.from_model(model, cache, prefill_chunk=64, modalities=["image"])
    assert PLACEHOLDER in torch.randint(VOCAB, (1, 2 * VOCAB - 8), generator=torch.Generator().manual_seed(0))
    bench(session, positions=[2 * VOCAB - 8], steps=1, prompt_length=64)
    with pytest.raises(InputError, match=r"pass each image \(--image FILE\), or leave its placeholders out"):
        session.prefill(torch.tensor([[PLACEHOLDER]]))
    # The last token of a vocabulary is followed by the first one, which may be a placeholder, too.
    assert text_after(7, {7, 0}, 8) == 1
    methods = {"encode_image": {"item": {"token_id": 5}}, "decode": {"item": None}}
    native = SimpleNamespace(vocab_size=8, placeholders=NativeSession.placeholders.fget(fields_of(methods)))
    native.max_length = native.longest_chunk = native.reset = native.prefill = None
    assert native.placeholders == {5} and 5 not in module._Native(native, 0).tokens(200)


def test_bench_decodes_at_the_positions_it_reports():
    session = session_of()
    bench(session, positions=[20, 0], steps=4)
    decodes = [position for method, _, (position,) in session.runner.calls if method == "decode"]
    warm_up = 3
    assert decodes == [*range(0, warm_up + 4), *range(20, 20 + warm_up + 4)]
    assert session.length.tolist() == [0]


def test_bench_starts_anew_where_positions_are_close_together():
    session = session_of()
    report = bench(session, positions=[4, 5], steps=2)
    decodes = [position for method, _, (position,) in session.runner.calls if method == "decode"]
    assert decodes == [4, 5, 6, 7, 8, 5, 6, 7, 8, 9]
    assert [row.position for row in report.decode] == [4, 5]


def test_bench_spreads_positions_over_the_cache():
    report = bench(session_of(), steps=5)
    positions = [row.position for row in report.decode]
    assert positions[0] == 0 and positions[-1] == LIMIT - 5 - 3
    assert positions == sorted(set(positions)) and len(positions) == 5


def test_bench_goes_past_the_window_where_there_is_no_limit():
    assert [row.position for row in bench(session_of("mistral"), steps=1).decode] == [0, 256, 512, 768, 1024]


def test_bench_of_one_step_has_a_p90():
    (row,) = bench(session_of(), positions=[0], steps=1).decode
    assert row.p90_ms == row.median_ms and math.isfinite(row.median_ms)


def test_bench_report_is_json():
    report = bench(session_of(), positions=[3], steps=2)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["decode"][0]["position"] == 3
    assert read["threads"] == torch.get_num_threads()


def test_peak_rss_counts_bytes():
    peak = peak_rss_bytes()
    assert peak is None or peak > 50 << 20
    ballast = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak is None or peak_rss_bytes() >= peak
    del ballast


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, ("steps", "0", "1 to 61")),
        ({"steps": LIMIT}, ("steps", str(LIMIT), "1 to 61", "to fit the cache")),
        ({"prompt_length": LIMIT + 1}, ("prompt_length", "65", "1 to 64")),
        ({"positions": [0, LIMIT], "steps": 1}, ("position", "64", "0 to 60")),
        ({"positions": [-1]}, ("position", "-1", "0 to")),
        ({"positions": []}, ("positions", "empty")),
        ({"seed": 10**23 - 1}, ("seed", str(10**23 - 1), str(2**64 - 1))),
        ({"seed": None}, ("seed", "None", str(2**64 - 1))),
    ],
)
def test_bench_refuses_what_does_not_fit_before_running(arguments, words):
    session = session_of()
    with pytest.raises(InputError) as caught:
        bench(session, **arguments)
    for word in words:
        assert word in str(caught.value)
    assert session.runner.calls == []


def test_an_encoder_decoder_encodes_before_it_is_timed() -> None:
    model = tiny_seq2seq("t5")
    session = Session.from_model(model, ExportableCache.from_model(model, 32, max_encoder_len=16))
    report = bench(session, positions=[0, 8], steps=2)
    assert [timing.position for timing in report.decode] == [0, 8]


def test_rows_have_the_rates_of_their_runs(monkeypatch):
    # Two readings a run: the first run of each test is not counted.
    durations = iter([9.0, 0.1, 0.2, 9.0, 0.5, 0.25])
    clock = [0.0]

    def read() -> float:
        read.calls += 1
        if read.calls % 2 == 0:
            clock[0] += next(durations)
        return clock[0]

    read.calls = 0
    monkeypatch.setattr(module.time, "perf_counter", read)
    prompt, generated = bench_rows(session_of(batch_size=2), (20,), (5,), runs=2)
    assert (prompt.test, prompt.prompt, prompt.generated) == ("pp20", 20, 0)
    assert prompt.samples == (pytest.approx(400), pytest.approx(200))
    assert (prompt.mean, prompt.deviation) == (pytest.approx(300), pytest.approx(100 * math.sqrt(2)))
    assert (generated.test, generated.prompt, generated.generated) == ("tg5", 0, 5)
    assert generated.samples == (pytest.approx(20), pytest.approx(40))
    assert generated.to_dict() == {
        "test": "tg5", "n_prompt": 0, "n_gen": 5, "avg_ts": pytest.approx(30),
        "stddev_ts": pytest.approx(10 * math.sqrt(2)), "samples_ts": [pytest.approx(20), pytest.approx(40)],
    }  # fmt: skip


def test_rows_start_from_an_empty_cache():
    session = session_of()
    (row,) = bench_rows(session, (), (3,), runs=1)
    assert [position for _, _, (position,) in session.runner.calls] == [0, 1, 2] * 2
    assert row.deviation == 0 and session.length.tolist() == [0]


def test_rows_that_do_not_fit_are_refused():
    for options, message in (
        (((LIMIT + 1,), ()), f"pp must be 1 to {LIMIT}, to fit the cache, got {LIMIT + 1}"),
        (((), (0,)), "tg must be 1 to"),
    ):
        with pytest.raises(InputError, match=message):
            bench_rows(session_of(), *options)
    with pytest.raises(InputError, match="runs must be at least 1, got 0"):
        bench_rows(session_of(), runs=0, pp=(4,), tg=())
