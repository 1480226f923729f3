"""TensorRT bundles without torch: binding, graphs, the loop, sampling and errors, over CUDA on the CPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from exportable_cache import Session
from exportable_cache.errors import BundleError, CacheFullError, DeviceMemoryError, InputError, NonFiniteLogitsError
from exportable_cache.generation.checkpoint_settings import CheckpointSettings
from exportable_cache.generation.host_sampling import distribution, draw, look_up, most_probable, penalised
from exportable_cache.generation.sampling import Sampling, sorted_distribution
from exportable_cache.generation.speculative import PromptLookup
from exportable_cache.program.program import Program
from exportable_cache.session.engine_session import CacheLimits, EngineSession, Step
from exportable_cache_runner import Options, Stop

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt import cuda_engines, engine_io
from exportable_cache.backends.tensorrt.cuda_engines import Cuda, CudaEngines, missing_package, open_cuda_engines
from exportable_cache.backends.tensorrt.engine_io import EngineRecord, check_computes
from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.target import engine_networks

from .cpu_cuda import CpuCuda, CpuTensorRT
from .cpu_engine import records_by_method
from .models import engine_model
from .programs import CAPACITY, PREFILL, engine_program, network_session, program_of

PROMPT = [5, 9, 2, 7, 1, 3, 8, 4, 6, 5, 2, 9, 1, 1, 4, 7, 3, 2, 8]


def opened(
    folder: Path,
    family: str = "gemma3_text",
    dtype: torch.dtype = torch.float32,
    score_length: int = 0,
    **given: Any,
) -> tuple[CudaEngines, CpuCuda]:
    """Return engines of a tiny model over the CPU, and the runtime that they use."""
    networks = given.pop("networks", None) or engine_program(family, dtype, score_length=score_length)[2]
    records = {name: ("engine.plan", record) for name, record in records_by_method(networks).items()}
    (folder / "engine.plan").write_bytes(b"plan")
    refused = given.pop("refused", None)
    runtime = CpuCuda(**given)
    tensorrt = CpuTensorRT([networks[name] for name in records], runtime, refused)
    return CudaEngines(folder, records, Cuda(runtime), tensorrt), runtime


def session_over(engines: Any, family: str = "gemma3_text", score_length: int = 0, **settings: Any) -> EngineSession:
    model, program, _ = engine_program(family, score_length=score_length)
    return session_of(engines, model, program, **settings)


def session_of(engines: Any, model: Any, program: Program, **settings: Any) -> EngineSession:
    layers = [{"policy": one.policy.to_config(), "states": None} for one in program.cache.layers]
    methods = {name: Step(one.min_length, one.max_length, one.scored_tokens) for name, one in program.methods.items()}
    limits = CacheLimits.of(layers)
    return EngineSession(engines, methods, model.config.vocab_size, limits, CheckpointSettings(**settings))


def torch_session(family: str = "gemma3_text", score_length: int = 0) -> Session:
    return network_session(*engine_program(family, score_length=score_length))


@pytest.fixture
def session(tmp_path: Path) -> EngineSession:
    return session_over(opened(tmp_path)[0])


def test_tokens_and_logits_are_those_of_torchs_session(tmp_path: Path) -> None:
    engines, runtime = opened(tmp_path)
    session, other = session_over(engines), torch_session()
    logits = session.prefill(PROMPT)
    expected = other.prefill(torch.tensor([PROMPT]))[0]
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=0, atol=1e-6)
    tokens, statistics = session.generate([7, 7], Options(max_new_tokens=20))
    assert tokens == list(other.generate(torch.tensor([[7, 7]]), 20))
    assert (statistics.prompt_tokens, statistics.generated_tokens, statistics.stop) == (2, 20, Stop.MAX_NEW_TOKENS)
    # The first decode initializes the engine, and the others are one graph.
    assert runtime.launches == 18
    engines.close()
    engines.close()
    assert not runtime.allocated


def test_logits_in_bfloat16_become_float32(tmp_path: Path) -> None:
    model = engine_model("llama", torch.bfloat16, num_hidden_layers=1)
    program = program_of(model)
    networks = engine_networks(program, TensorRTOptions())
    engines, _ = opened(tmp_path, networks=networks)
    expected = network_session(model, program, networks).prefill(torch.tensor([PROMPT[:PREFILL]]))[0]
    found = engines.run("prefill", PROMPT[:PREFILL], 0)[0]
    assert found.dtype == np.float32
    assert torch.equal(torch.from_numpy(found), expected.float())


def test_proposed_tokens_are_scored_in_one_step(tmp_path: Path) -> None:
    """Compare with the same text token by token; three methods share the engine."""
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    engines, runtime = opened(tmp_path, "llama", score_length=4)
    session = session_over(engines, "llama", 4)
    plain = session.generate(prompt, Options(max_new_tokens=20))[0]
    launches = runtime.launches
    session.reset()
    tokens, statistics = session.generate(prompt, Options(max_new_tokens=20, prompt_lookup=3))
    other = torch_session("llama", 4)
    assert tokens == plain == list(other.generate(torch.tensor([prompt]), 20, draft=PromptLookup(3)))
    assert 0 < statistics.accepted_tokens <= statistics.proposed_tokens
    # Steps without a proposal are decode's.
    assert runtime.launches - launches < launches
    assert session.length == len(prompt) + 19


def test_rejected_proposals_are_rolled_back(tmp_path: Path) -> None:
    session = session_over(opened(tmp_path, "llama", score_length=4)[0], "llama", 4)
    other = torch_session("llama", 4)
    # Proposals that a mask forbids are all rejected.
    asked: list[int] = []

    def allow(tokens: list[int], mask: Any) -> bool:
        asked.append(len(tokens))
        mask[(50 + len(tokens)) // 32] |= 1 << (50 + len(tokens)) % 32
        return True

    tokens, statistics = session.generate(
        [1, 2, 50, 7, 7, 7, 51, 9, 9, 9], Options(max_new_tokens=6, prompt_lookup=3, allowed_tokens=allow)
    )
    assert tokens == list(range(50, 56)) and asked == list(range(6))
    assert statistics.proposed_tokens > 0 and statistics.accepted_tokens == 0
    text = [1, 2, 50, 7, 7, 7, 51, 9, 9, 9, *tokens[:-1]]
    assert session.length == len(text)
    found = session.prefill([3])
    expected = other.prefill(torch.tensor([[*text, 3]]))[0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5)


def test_a_window_that_loses_proposals_is_refused(tmp_path: Path) -> None:
    model = engine_model("gemma3_text")
    program = program_of(model, options=TensorRTOptions(score_length=4))
    # Nothing runs, so the engines lack the method of proposals.
    session = session_of(opened(tmp_path)[0], model, program)
    with pytest.raises(InputError, match="prompt_lookup must be 0 .* 3 tokens cannot be taken back; .* at least 2"):
        session.generate([1], Options(prompt_lookup=3))


def test_rolled_back_tokens_are_replaced(session: EngineSession) -> None:
    other = torch_session()
    session.prefill([1, 2, 3, 4])
    session.rewind(2)
    found = session.prefill([9])
    expected = other.prefill(torch.tensor([[1, 2, 9]]))[0]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-6)
    assert session.length == 3 and session.max_length == CAPACITY
    session.reset()
    assert session.length == 0


def test_a_kept_prefix_is_not_fed_again(session: EngineSession) -> None:
    whole = session.generate([1, 2, 3, 4, 5], Options(max_new_tokens=4))[0]
    session.reset()
    session.prefill([1, 2, 3, 8])
    tokens, statistics = session.generate([1, 2, 3, 4, 5], Options(max_new_tokens=4, cached_tokens=3))
    assert tokens == whole and statistics.prompt_tokens == 2


@pytest.mark.parametrize("moved", [False, True])
def test_what_a_window_has_lost_cannot_be_taken_back(session: EngineSession, moved: bool) -> None:
    layers = engine_program("gemma3_text")[1].cache.layers
    length, ever = (20, 20) if moved else (5, 5)
    expected = min(layer.max_rollback(length, ever) for layer in layers)
    session.prefill(list(range(1, length + 1)))
    with pytest.raises(InputError, match=f"at most {expected} tokens|the {length} tokens that the cache holds"):
        session.rewind(expected + 1)
    session.rewind(expected)
    assert session.length == length - expected


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda one: one.prefill([]), "tokens must be at least one, got none"),
        (lambda one: one.prefill([1, 128]), r"tokens\[1\] must be a token id from 0 to 127, got 128"),
        (lambda one: one.prefill([-1]), "got -1"),
        (lambda one: one.prefill([1.5]), r"tokens\[0\] must be a token id from 0 to 127, got 1.5"),
        (lambda one: one.generate("abc", Options()), r"tokens\[0\] must be a token id .* got 'a'"),
        (lambda one: one.generate(5, Options()), "must be a sequence of token ids, got a int; pass a list"),
        (lambda one: one.rewind(1), "the 0 tokens that the cache holds, got 1"),
        (
            lambda one: one.generate([1], Options(prompt_lookup=2)),
            "must be 0 .* got 2, .* -O score_length=3",
        ),
        (lambda one: one.generate([1, 2], Options(cached_tokens=1)), "cached_tokens must be from 0 to 0, .* got 1"),
        (lambda one: one.encode_input([1]), "must have an encoder"),
        (
            lambda one: one.generate([1], Options(allowed_tokens=lambda tokens, mask: True)),
            "after 0 new ones, got none",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(
    session: EngineSession, call: Callable[[EngineSession], object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        call(session)
    assert session.length == 0


def test_tokens_may_be_arrays(session: EngineSession) -> None:
    expected = session.prefill([1, 2])
    for tokens in (np.array([1, 2]), torch.tensor([1, 2])):
        session.reset()
        assert session.prefill(tokens) == expected


def test_a_full_cache_ends_a_generation_or_refuses_a_prompt(session: EngineSession) -> None:
    tokens, statistics = session.generate([1] * (CAPACITY - 2), Options())
    assert (len(tokens), statistics.stop, session.length) == (3, Stop.CACHE_FULL, CAPACITY)
    with pytest.raises(CacheFullError, match=f"holds {CAPACITY} of at most {CAPACITY}"):
        session.prefill([1])


def test_a_generation_ends_for_each_reason(session: EngineSession) -> None:
    first = session.generate([1, 2], Options(max_new_tokens=3))[0]
    taken: list[int] = []

    def cancel(token: int) -> None:
        taken.append(token)
        session.cancel()

    def stop_of(options: Options, on_token: Callable[[int], object] | None = None) -> Stop:
        session.reset()
        return session.generate([1, 2], options, on_token)[1].stop

    assert stop_of(Options(), lambda token: False) == Stop.CALLBACK
    assert stop_of(Options(stop_tokens=[first[0]])) == Stop.END_TOKEN
    assert stop_of(Options(), cancel) == Stop.CANCELLED and taken == first[:1]
    assert stop_of(Options(allowed_tokens=lambda tokens, mask: False)) == Stop.WHOLE
    session.reset()
    session.settings = CheckpointSettings(ends=(first[0],))
    assert session.generate([1, 2], Options())[0] == first[:1]
    session.reset()
    session.settings = CheckpointSettings(max_length=5)
    assert len(session.generate([1, 2], Options())[0]) == 3


def errors_of(call: Callable[[], object]) -> list[BaseException]:
    """Run a call in a thread that the test run does not wait for at its end, and return its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the call does not return"
    return errors


def test_a_callback_cannot_use_the_session_and_its_error_passes(session: EngineSession) -> None:
    for call in (session.reset, session.close):
        errors = errors_of(lambda call=call: session.generate([1], Options(), lambda token: call()))
        assert [type(error) for error in errors] == [InputError] and "in use" in str(errors[0])
    with session:
        assert session.length > 0
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.prefill([1])


def test_a_mask_of_allowed_tokens_is_followed(session: EngineSession) -> None:
    def allow(tokens: list[int], mask: Any) -> bool:
        mask[40 // 32] |= 1 << 40 % 32
        mask[100 // 32] |= 1 << 100 % 32
        return len(tokens) < 3

    tokens, statistics = session.generate([1, 2], Options(allowed_tokens=allow))
    assert set(tokens) <= {40, 100} and len(tokens) == 3 and statistics.stop == Stop.WHOLE


def test_log_probabilities_are_those_of_the_logits(session: EngineSession) -> None:
    logits = torch.tensor(session.prefill([1, 2]))
    session.reset()
    given: list[tuple[float, list[tuple[int, float]]]] = []
    tokens, _ = session.generate(
        [1, 2], Options(max_new_tokens=1, on_logprobs=lambda *found: given.append(found), alternatives=3)
    )
    expected, best = logits.log_softmax(0).topk(3)
    assert [token for token, _ in given[0][1]] == best.tolist() and tokens == best[:1].tolist()
    assert given[0][0] == pytest.approx(expected[0].item(), abs=1e-5)
    assert [value for _, value in given[0][1]] == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_penalty_of_the_checkpoint_or_of_the_call_is_applied(tmp_path: Path) -> None:
    penalty = 1.8
    other = list(torch_session().generate(torch.tensor([[1, 2]]), 12, repetition_penalty=penalty))
    session = session_over(opened(tmp_path)[0], repetition_penalty=penalty)
    plain = session.generate([1, 2], Options(max_new_tokens=12, repetition_penalty=1.0))[0]
    session.reset()
    assert session.generate([1, 2], Options(max_new_tokens=12))[0] == other != plain


@pytest.mark.parametrize(("penalty", "expected"), [(1e-300, [1.0, -2.0]), (1e300, [1.0, -2.0]), (2.0, [1.0, -2.0])])
def test_finite_logits_stay_finite_with_any_penalty(penalty: float, expected: list[float]) -> None:
    logits = np.array([*expected, 3.0, -4.0, np.inf, -np.inf, np.nan], np.float32)
    found = penalised(logits, np.arange(2, 7), penalty)
    assert found[:2].tolist() == expected and np.isfinite(found[:4]).all()
    np.testing.assert_array_equal(found[4:], logits[4:])
    if penalty == 2:
        assert found[2:4].tolist() == [1.5, -8.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2]),
        ([4, 3, 7, 6, 3, 8, 2, 3], [8, 2]),
        ([7, 7, 7], [7]),
        ([1, 2], []),
        ([1], []),
        ([], []),
    ],
)
def test_the_longest_and_then_the_latest_match_is_proposed(text: list[int], expected: list[int]) -> None:
    assert look_up(text, 2) == expected


@pytest.mark.parametrize(
    "limits",
    [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.1}, {"top_k": 200}],
)
def test_probabilities_are_those_of_torchs_sampler(limits: dict[str, Any]) -> None:
    logits = 3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    logits[7] = logits[9] = logits.max()
    sampling = Sampling(temperature=0.8, **limits)
    expected, order = sorted_distribution(logits[None], sampling.settings())
    tokens, weights = distribution(logits.numpy(), 0.8, **limits)
    found = torch.zeros(64, dtype=torch.float64)
    found[tokens] = torch.from_numpy(weights / weights.sum())
    torch.testing.assert_close(found[order[0]].float(), expected[0], rtol=1e-4, atol=1e-6)


def test_draws_follow_the_weights_and_the_seed(session: EngineSession) -> None:
    tokens, weights = np.array([4, 9, 2]), np.array([1.0, 0.0, 3.0])
    assert [draw(tokens, weights, uniform) for uniform in (0, 0.24, 0.26, 1 - 2**-53)] == [4, 4, 2, 2]
    assert most_probable(np.array([1, 5, 5, 0], np.float32), 2) == [1, 2]

    def drawn(seed: int) -> list[int]:
        session.reset()
        return session.generate([1, 2], Options(max_new_tokens=8, temperature=2.0, top_k=50, seed=seed))[0]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(("here", "built", "refused"), [(90, [89], True), (90, [], False), (90, [80, 89], False)])
def test_plans_that_hopper_computes_wrongly_are_refused(here: int, built: list[int], refused: bool) -> None:
    record = records_by_method(engine_program("llama")[2])["decode"].model_copy(update={"capabilities": built})
    with pytest.raises(BundleError, match="SM 80 to run on SM 90, got one for SM 89") if refused else nullcontext():
        check_computes(here, record)


def test_logits_that_are_not_finite_end_with_their_position() -> None:
    engines = SimpleNamespace(run=lambda *step: np.full((1, 128), np.nan, np.float32), close=lambda: None)
    with pytest.raises(NonFiniteLogitsError, match="not finite at position 1"):
        session_over(engines).generate([1, 2], Options())


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"free": 1024}, DeviceMemoryError, r"must have .* KiB free \(4 B of plans, .* got 1.0 KiB of 2.0 KiB"),
        (
            {"refused": "another version"},
            BundleError,
            "cannot load engine.plan, which .* built for SM 80.* SM 89: another version; export again with sm=89",
        ),
        ({"refused": "no", "capability": (10, 0)}, BundleError, "SM 100: no; TensorRT-RTX builds no plan for it"),
    ],
)
def test_a_gpu_that_cannot_run_a_plan_is_named_with_both_sides(
    tmp_path: Path, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        opened(tmp_path, **given)


@pytest.mark.parametrize(
    ("status", "driver", "said"),
    [
        (35, 12040, "must support CUDA 13.0 of the installed cuda-bindings, got 12.4; .*'cuda-bindings<=12.4'"),
        (35, 0, "must support CUDA 13.0, got none; install"),
        (100, 13000, "needs an NVIDIA GPU, and CUDA finds none .status 100"),
    ],
)
def test_a_missing_gpu_or_an_old_driver_is_named(status: int, driver: int, said: str) -> None:
    runtime = CpuCuda(driver=driver)
    runtime.failing["cudaGetDeviceCount"] = status
    with pytest.raises(BundleError, match=said):
        Cuda(runtime)


def test_another_release_of_tensorrt_is_named_with_the_builders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_io, "_installed", lambda package: "1.6.0")
    with pytest.raises(
        BundleError, match=r"rtx 1.6.0 cannot load .* which tensorrt-rtx 1\.5.*; pip install tensorrt-rtx==1\.5"
    ):
        opened(tmp_path, refused="another version")


def test_memory_that_runs_out_releases_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, networks = engine_program("gemma3_text")
    records = {name: ("engine.plan", record) for name, record in records_by_method(networks).items()}
    (tmp_path / "engine.plan").write_bytes(b"plan")
    runtime = CpuCuda()
    runtime.failing["cudaMallocHost"] = 2
    modules = {"cuda.bindings.runtime": runtime}
    fake = CpuTensorRT(list(networks.values()), runtime)
    monkeypatch.setattr(cuda_engines, "import_module", lambda name: modules.get(name, fake))
    with pytest.raises(DeviceMemoryError, match="cudaMallocHost found too little memory"):
        open_cuda_engines(tmp_path, records)
    assert not runtime.allocated


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": []}, "the inputs input_ids and input_pos, got "),
        ({"outputs": []}, "an output logits, got "),
        ({"aliases": {"next.layers.1.keys": "cache.other"}}, "an input for each part of the cache"),
        ({"outputs": [{"name": "logits", "dtype": "float32", "shape": [1, -1, 8]}]}, "sizes above 0, got -1"),
        ({"outputs": [{"name": "logits", "dtype": "bool", "shape": [1, 8]}]}, "dtype bool, and this release"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    _, _, networks = engine_program("gemma3_text")
    record = records_by_method(networks)["decode"]
    changed = EngineRecord.model_validate({**record.model_dump(), **change})
    (tmp_path / "engine.plan").write_bytes(b"plan")
    runtime = CpuCuda()
    tensorrt = CpuTensorRT([networks["decode"]], runtime)
    with pytest.raises(BundleError, match=said):
        CudaEngines(tmp_path, {"decode": ("engine.plan", changed)}, Cuda(runtime), tensorrt)


@pytest.mark.parametrize(
    ("method", "part", "name", "sizes", "said"),
    [
        (
            "prefill",
            "inputs",
            "cache.",
            {"max_shape": [1, 1, 640, 16]},
            "'prefill' must have the cache of 'decode', got",
        ),
        ("prefill", "inputs", "cache.", {"name": "cache.layers.9.keys"}, "an input for each part of the cache"),
        ("decode", "outputs", "next.", {"shape": [100, 1, 64, 16]}, "as large as the parts of the cache .* got next."),
        ("decode", "outputs", "logits", {"shape": [1, 3]}, r"must have logits \[1, .*, got \[1, "),
        ("decode", "outputs", "logits", {"shape": []}, r"logits .*, got \["),
        ("decode", "outputs", "logits", {"dtype": "float16"}, r"logits .* must be float16 .* got float32 \[1, 128\]"),
        (
            "decode",
            "inputs",
            "input_ids",
            {"max_shape": [2, 1]},
            r"input_ids of integers \[1, tokens\], got int64 \[2, 1\]",
        ),
        ("decode", "inputs", "input_pos", {"max_shape": []}, r"input_pos of integers \[1\], got int64 \[\]"),
        ("decode", "outputs", "next.", {"name": "logits"}, "one tensor of each name"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, method: str, part: str, name: str, sizes: dict[str, Any], said: str
) -> None:
    _, _, networks = engine_program("gemma3_text")
    fields = {one: record.model_dump() for one, record in records_by_method(networks).items()}
    next(one for one in fields[method][part] if one["name"].startswith(name)).update(sizes)
    records = {one: ("engine.plan", EngineRecord.model_validate(found)) for one, found in sorted(fields.items())}
    (tmp_path / "engine.plan").write_bytes(b"plan")
    runtime = CpuCuda()
    tensorrt = CpuTensorRT([networks[one] for one in fields], runtime)
    with pytest.raises(BundleError, match=said):
        CudaEngines(tmp_path, records, Cuda(runtime), tensorrt)


def test_more_tokens_than_a_method_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=f"must take {PREFILL + 1} tokens, as the manifest says, got at most {PREFILL}"
    ):
        opened(tmp_path)[0].run("prefill", [1] * (PREFILL + 1), 0)


def test_an_engine_that_fails_is_named(tmp_path: Path) -> None:
    engines, _ = opened(tmp_path)
    engines._steps["decode"]._context.execute_async_v3 = lambda stream: engines._log.errors.append("why")
    with pytest.raises(BundleError, match="could not run method 'decode': why"):
        engines.run("decode", [1], 0)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"cuda.bindings.runtime": 1, "tensorrt_rtx": 1}
    monkeypatch.setattr(cuda_engines.util, "find_spec", known.get)
    assert missing_package("tensorrt-rtx 1.5.0.114") is None
    assert missing_package("tensorrt 11.4") == "tensorrt"
    monkeypatch.setattr(cuda_engines.util, "find_spec", lambda name: None)
    assert missing_package("tensorrt-rtx 1.5.0.114") == "cuda-bindings"


def test_policies_have_the_limits_of_the_cache() -> None:
    ring = {"policy": {"kind": "ring", "window": 8, "rollback_slots": 4}, "states": None}
    state = {"policy": {"kind": "none"}, "states": {"kind": "convolution"}}
    assert CacheLimits.of([ring]).max_rollback(20, 20) == 5
    assert CacheLimits.of([ring]).max_length is None
    assert CacheLimits.of([ring, state]).max_rollback(20, 20) == 0
    with pytest.raises(KeyError, match="later"):
        CacheLimits.of([{"policy": {"kind": "later"}}])


def test_nothing_of_it_imports_torch() -> None:
    code = (
        "import sys\n"
        "from exportable_cache.backends.tensorrt import cuda_engines\n"
        "from exportable_cache.session import engine_session, native\n"
        "assert cuda_engines.CudaEngines and engine_session.EngineSession\n"
        "print([name for name in ('torch', 'transformers', 'tensorrt') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
