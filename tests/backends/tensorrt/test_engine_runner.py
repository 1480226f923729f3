"""Binding engines to one cache: addresses, aliases and copies, with networks on the CPU in the place of engines."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportable_cache import Session
from exportable_cache.backends.base import ProgramDescription, products_of
from exportable_cache.errors import BundleError, CacheFullError, DeviceMemoryError
from exportable_cache.verification.verify import verify_session

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.engine_io import EngineRecord, details_of
from exportable_cache.backends.tensorrt.engine_runner import EngineRunner, open_engines, runs_here
from exportable_cache.backends.tensorrt.network import Network

from ...support.sessions import describe
from .cpu_engine import CpuContext, cpu_engine_runner, records_by_method
from .programs import CAPACITY, engine_program, network_session


def runner_over(program, networks: dict[str, Network], shuffled: bool = False) -> EngineRunner:
    records = records_by_method(networks)
    if shuffled:
        # As torch_tensorrt may: only the method's own inputs keep their order, which is that of the call.
        records = {
            name: record.model_copy(
                update={"inputs": [*record.inputs[2:][::-1], *record.inputs[:2]], "outputs": record.outputs[::-1]}
            )
            for name, record in records.items()
        }
    return cpu_engine_runner(program, networks, records)


def session_over(model, program, runner: EngineRunner) -> Session:
    return Session(
        runner, program.cache.layers, model.config.vocab_size, batch_size=program.batch_size, target="tensorrt"
    )


@pytest.mark.parametrize(
    ("family", "in_place", "shuffled"),
    [
        ("gemma3_text", True, False),
        pytest.param("llama", True, True, marks=pytest.mark.full),
        pytest.param("llama", False, False, marks=pytest.mark.full),
    ],
)
def test_engines_share_one_cache_by_address(family: str, in_place: bool, shuffled: bool) -> None:
    model, program, networks = engine_program(family, in_place=in_place)
    runner = runner_over(program, networks, shuffled)
    report = verify_session(
        session_over(model, program, runner), model, tolerance=1e-4, prompts=[3, 20], decode_steps=8
    )
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("engines", "decoded_in_place"),
    [("shared", [1]), pytest.param("separate", [0, 1], marks=pytest.mark.full)],
)
def test_aliased_outputs_are_bound_to_their_inputs_and_the_others_are_copied(
    engines: str, decoded_in_place: list[int]
) -> None:
    _, program, networks = engine_program("gemma3_text", engines=engines)
    runner = runner_over(program, networks)
    state = {name: tensor.data_ptr() for name, tensor in runner.state.items()}
    assert len(set(state.values())) == 4
    for method, in_place in (("decode", decoded_in_place), ("prefill", [1])):
        addresses = runner._contexts[method]._addresses
        assert {name: addresses[name] for name in state} == state
        for layer in (0, 1):
            for kind in ("keys", "values"):
                same = addresses[f"next.layers.{layer}.{kind}"] == addresses[f"cache.layers.{layer}.{kind}"]
                assert same is (layer in in_place)
        assert len(runner.steps[method].copies) == 4 - 2 * len(in_place)


def test_logits_of_several_tokens_come_from_the_shared_engine() -> None:
    model, program, networks = engine_program("llama", score_length=4)
    assert len({id(network.definition) for network in networks.values()}) == 1
    records = records_by_method(networks)
    assert {name: record.outputs[0].shape for name, record in records.items()} == dict.fromkeys(records, [1, 4, 128])
    assert {name: record.profile for name, record in records.items()} == {"decode": 0, "prefill": 1, "forward": 2}
    sessions = [session_over(model, program, runner_over(program, networks)), network_session(model, program, networks)]
    ids = torch.tensor([[5, 9, 2, 7, 1, 3, 8]])
    expected = model(ids).logits
    for session in sessions:
        torch.testing.assert_close(session.prefill(ids[:, :3]), expected[:, 2], rtol=0, atol=1e-5)
        torch.testing.assert_close(session.score(ids[:, 3:6]), expected[:, 3:6], rtol=0, atol=1e-5)
        torch.testing.assert_close(session.decode(ids[:, 6]), expected[:, 6], rtol=0, atol=1e-5)


def test_the_session_refuses_a_write_past_the_cache_before_it_runs() -> None:
    model, program, networks = engine_program("gemma3_text")
    runner = runner_over(program, networks)
    session = session_over(model, program, runner)
    session.prefill(torch.ones(1, CAPACITY, dtype=torch.int64))
    before = {name: tensor.clone() for name, tensor in runner.state.items()}
    with pytest.raises(CacheFullError):
        session.decode(torch.tensor([1]))
    assert all(torch.equal(runner.state[name], tensor) for name, tensor in before.items())


def test_an_engine_without_a_recorded_tensor_is_refused() -> None:
    _, program, networks = engine_program("gemma3_text")
    records = records_by_method(networks)
    record = records["decode"]
    records["decode"] = record.model_copy(
        update={"outputs": [*record.outputs, record.outputs[0].model_copy(update={"name": "more"})]}
    )
    contexts = {name: CpuContext(network) for name, network in networks.items()}
    with pytest.raises(BundleError, match="has no tensor 'more'"):
        EngineRunner(program.methods, records, contexts, torch.device("cpu"))


def _described(folder: Path, builder: str) -> ProgramDescription:
    _, program, networks = engine_program("gemma3_text")
    records = [one.model_copy(update={"builder": builder}) for one in records_by_method(networks).values()]
    (folder / "engine.plan").write_bytes(b"plan")
    return replace(describe(program), details={"engine.plan": details_of(*records)})


@pytest.mark.parametrize(
    ("free", "kind", "said"),
    [
        (1024, DeviceMemoryError, r"must have .* free \(4 B of plans, .*\), got 1\.0 KiB of 2\.0 KiB; end other"),
        (
            1 << 30,
            BundleError,
            r"tensorrt-rtx 1\.5.* cannot load engine\.plan, which tensorrt-rtx 9\.9 built for SM 80.* SM 89: bad magic;"
            r" pip install tensorrt-rtx==9\.9, or export again with sm=89",
        ),
    ],
)
def test_a_gpu_that_cannot_run_a_plan_is_named_with_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kind: type[Exception], said: str
) -> None:
    from exportable_cache.backends.tensorrt import upstream

    def load(plan: bytes) -> None:
        logging.getLogger("torch_tensorrt [TensorRT Conversion Context]").error("bad magic")

    for name, value in (
        ("is_available", True),
        ("get_device_capability", (8, 9)),
        ("mem_get_info", (free, 2 * free)),
        ("current_stream", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    runtime = SimpleNamespace(deserialize_cuda_engine=load)
    monkeypatch.setattr(upstream, "trt", SimpleNamespace(Runtime=lambda log: runtime))
    with pytest.raises(kind, match=said):
        open_engines(tmp_path, _described(tmp_path, "tensorrt-rtx 9.9"))


def test_an_old_driver_is_named_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update it.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        BundleError, match=r"finds none: .*too old \(found version 12040\), and torch was built for CUDA 13\.0; copy"
    ):
        open_engines(tmp_path, _described(tmp_path, "tensorrt-rtx 9.9"))


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((8, 0), [], True),
        ((8, 6), [80, 86], True),
        ((8, 9), [80, 86], False),
        ((9, 0), [], True),
        ((9, 0), [80, 86], True),
        ((9, 0), [86, 89], False),
        ((10, 0), [], False),  # not on TensorRT-RTX's list
        ((12, 0), [], True),
        (None, [], False),
    ],
)
def test_which_gpus_run_a_plan(monkeypatch, capability, built_for: list[int], expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    record = EngineRecord(
        method="decode", inputs=[], outputs=[], aliases={}, capabilities=built_for, layers={}, network="", builder=""
    )
    assert runs_here([record]) is expected


def test_float32_products_are_judged_by_the_bits_of_tf32() -> None:
    """TensorRT-RTX multiplies float32 with 10 bits on a GPU, and the evaluator with all of them."""
    model, program, networks = engine_program("gemma3_text")
    runner = runner_over(program, networks)
    assert all(record.products == "tf32" for record in runner.records.values())
    assert runner.products == products_of(runner) == torch.float16
    report = verify_session(session_over(model, program, runner), model, prompts=[3], decode_steps=8)
    exact = verify_session(network_session(model, program, networks), model, prompts=[3], decode_steps=8)
    assert report.tolerance >= 5e-3 and exact.tolerance < 1e-3
