"""The GPU check script and the bindings that it looks at, over engines on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from exportable_cache import Session
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.session.adapters import read_adapter
from exportable_cache_runner import Statistics, Stop

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from .cpu_engine import cpu_engine_runner
from .programs import engine_program

SCRIPT = Path(__file__).parents[3] / "export_scripts" / "check_tensorrt_on_gpu.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The GPU check script as a module."""
    spec = importlib.util.spec_from_file_location("check_tensorrt_on_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_session(family: str = "gemma3_text") -> tuple[Session, torch.nn.Module]:
    """A session over engines on the CPU, as on a GPU machine, and its model."""
    model, program, networks = engine_program(family)
    runner = cpu_engine_runner(program, networks)
    return Session(runner, program.cache.layers, model.config.vocab_size, batch_size=1, target="tensorrt"), model


def checked(script: ModuleType, check: str, subject: object) -> dict[str, dict]:
    """Results of one of the script's checks."""
    checks = script.Checks(Console(quiet=True))
    getattr(script, check)(subject, checks)
    return checks.results


@pytest.mark.full
def test_script_sees_shared_memory(script: ModuleType) -> None:
    session, _ = engine_session()
    results = checked(script, "check_aliases", session.runner)
    assert all(result["passed"] for result in results.values())
    assert results["aliases of decode"]["detail"] == "2 outputs share memory with an input"


@pytest.mark.parametrize("fault", ["engine without aliases", "another address"])
def test_script_sees_memory_that_is_not_shared(script: ModuleType, fault: str) -> None:
    session, _ = engine_session()
    context = session.runner._contexts["decode"]
    if fault == "engine without aliases":
        context.engine = SimpleNamespace(get_aliased_input_tensor=lambda name: None)
    else:
        context.set_tensor_address("next.layers.1.keys", 0)
    results = checked(script, "check_aliases", session.runner)
    assert not results["aliases of decode"]["passed"]
    assert results["aliases of prefill"]["passed"]


@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_script_sees_that_one_slot_changes(script: ModuleType, family: str) -> None:
    session, _ = engine_session(family)
    (result,) = checked(script, "check_in_place", session).values()
    assert result["passed"], result


def test_script_sees_a_second_slot_that_changes(script: ModuleType) -> None:
    session, _ = engine_session()
    context = session.runner._contexts["decode"]
    execute = context.execute_async_v3

    def spills(stream: int) -> bool:
        session.runner.state["cache.layers.1.values"][:, :, 9] += 1
        return execute(stream)

    context.execute_async_v3 = spills
    (result,) = checked(script, "check_in_place", session).values()
    assert not result["passed"]
    assert result["detail"] == "cache.layers.1.values changed in slots [5, 9]"


@pytest.mark.parametrize(
    ("tokens", "fails", "said"),
    [
        (None, False, "32 tokens, 0.500 ms each, the first after 2.0 ms; 3.0 MiB of the GPU; 5 proposals"),
        ([3], True, "tokens [3], and ["),
        ("looked_up", True, "looked_up [3], and ["),
        ("left", False, "not run: cuda-bindings is not installed"),
    ],
)
def test_script_compares_tokens_without_torch(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: object, fails: bool, said: str
) -> None:
    session, _ = engine_session()
    expected = [int(token) for token in session.generate(torch.tensor([list(range(1, 10))]), 32)]
    found = {"tokens": expected, "milliseconds": 0.5, "first": 2.0, "torch": False, "bytes": 3 << 20, "accepted": 5}
    found["looked_up"] = [3] if tokens == "looked_up" else expected
    if isinstance(tokens, list):
        found["tokens"] = tokens
    if tokens == "left":
        found = {"left": "cuda-bindings is not installed"}
    done = SimpleNamespace(returncode=0, stdout=json.dumps(found), stderr="")
    monkeypatch.setattr(script.subprocess, "run", lambda command, **options: done)
    checks = script.Checks(Console(quiet=True))
    script.check_without_torch(Path("bundle"), session, checks, proposed=3)
    result = checks.results["without torch"]
    assert result["passed"] is not fails and result["detail"].startswith(said)


def test_script_runs_the_session_without_torch(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[object] = []

    def generate(
        prompt: list[int], take: Callable[[int], object], max_new_tokens: int, prompt_lookup: int = 0
    ) -> Statistics:
        for token in [one + 10 * len(used) for one in prompt[:max_new_tokens]]:
            take(token)
        return Statistics(3, 2, 0.25, 0.5, 0, prompt_lookup, Stop.MAX_NEW_TOKENS)

    runner = SimpleNamespace(load_adapter=lambda path, name: used.append(path), use_adapter=lambda name: None)
    session = SimpleNamespace(reset=lambda: None, generate=generate, close=lambda: None, runner=runner)
    monkeypatch.setattr("exportable_cache.session.native.open_native", lambda path, trust, text: session)
    monkeypatch.setattr(sys, "argv", ["-c", "bundle", "[4, 5, 6]", "2", "3", '"file"'])
    exec(script._WITHOUT_TORCH, {})
    found = json.loads(capsys.readouterr().out)
    assert found == {
        **{"tokens": [4, 5], "milliseconds": 500.0, "first": 250.0, "torch": True, "bytes": 0},
        **{"looked_up": [4, 5], "accepted": 3, "adapted": [14, 15]},
    }
    assert used == ["file"]


def test_script_times_interleaved_rounds(script: ModuleType) -> None:
    calls: list[tuple[str, int]] = []
    forms = {name: lambda position, name=name: calls.append((name, position)) for name in ("a", "b")}
    medians = script.timed(forms, [1, 2], rounds=2, steps=3)
    assert set(medians) == {"a", "b"} and set(medians["a"]) == {1, 2}
    after_warm_up = [name for name, position in calls if position == 1][10:]
    assert after_warm_up == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3


def test_script_decodes_eagerly_at_one_position_again_and_again(script: ModuleType) -> None:
    """A hybrid model: its full layers must not grow from step to step."""
    model, _, _ = engine_program("gemma3_text")
    step = script.dynamic_step(model)
    with torch.no_grad():
        step(12)
        cache = next(cell.cell_contents for cell in step.__closure__ if isinstance(cell.cell_contents, dict))[12]
        lengths = [layer.keys.shape[2] for layer in cache.layers]
        step(12)
    assert [layer.keys.shape[2] for layer in cache.layers] == lengths
    assert 12 in lengths


@pytest.mark.parametrize("captured", [True, False])
def test_script_times_engines_with_and_without_a_graph(script: ModuleType, captured: bool) -> None:
    session, _ = engine_session()
    logits = script.engine_step(session.runner, captured)(3)
    assert logits.shape == (1, session.vocab_size)
    assert session.runner.steps["decode"]._captures is captured


def test_script_without_a_gpu_says_so(script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(script.typer.Exit) as exit_:
        script.main()
    assert exit_.value.exit_code == 2
    assert "torch finds no NVIDIA GPU here" in capsys.readouterr().out


def test_script_builds_without_a_gpu(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The bundle that it builds has what the options ask for, and takes the adapter that the check draws."""
    sizes = {"score_length": 3, "lora_slots": 1, "max_cache_len": 64}
    with pytest.raises(script.typer.BadParameter, match="must be given with --build-only"):
        script.main(shape="llama-tiny", build_only=True, **sizes)
    script.main(shape="llama-tiny", dtype="float32", output=tmp_path / "bundle", build_only=True, **sizes)
    assert "engine.plan" in capsys.readouterr().out
    bundle = Bundle.open(tmp_path / "bundle", trust=True)
    assert bundle.manifest.description().methods["forward"].scored_tokens == 3
    adapter = script.random_adapter(bundle, tmp_path / "adapter")
    slots = bundle.manifest.program.lora.described()
    assert len(read_adapter(adapter, slots, bundle.manifest.fingerprint, None).tensors) == len(slots.targets) > 0
