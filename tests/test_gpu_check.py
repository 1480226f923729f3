"""The check of a GPU, `benchmarks/gpu_check.py`, and the benchmark and the script that it runs, on a CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from exportable_cache.errors import BundleError

from .support.compiling import compiling_with

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.project


@pytest.fixture(scope="module")
def imported() -> Iterator[Callable[[str], ModuleType]]:
    """`imported("loop")` is a module of a script's folder."""
    folders = [str(ROOT / name) for name in ("benchmarks", "export_scripts")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*folders, *sys.path])
        yield importlib.import_module


@pytest.fixture
def check(imported: Callable[[str], ModuleType]) -> Any:
    return imported("gpu_check")


@pytest.fixture
def sessions(imported: Callable[[str], ModuleType]) -> Any:
    return imported("gpu_sessions")


@pytest.fixture
def loop(imported: Callable[[str], ModuleType]) -> Any:
    return imported("loop")


@pytest.fixture
def tensorrt(imported: Callable[[str], ModuleType]) -> Any:
    return imported("check_tensorrt_on_gpu")


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_part_that_is_killed_keeps_its_rows(check: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(json.dumps({"part": "x", "name": "first", "result": "right", "passed": True, "seconds": 1}) + "\n")
    rows = check.spawned([sys.executable, "-c", "import time; time.sleep(600)"], 0.1, path, "x")
    assert [(row.name, row.passed) for row in rows] == [("first", True), ("the whole part", None)]
    assert rows[1].result == "killed at its limit of 0 s"


def test_a_part_that_fails_says_so(check: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    (row,) = check.spawned(command, 600, tmp_path / "missing", "x")
    assert (row.part, row.result, row.passed) == ("x", "ended with 3", False)
    assert check.spawned([sys.executable, "-c", ""], 600, tmp_path / "missing", "x") == []


def test_an_exception_is_a_result(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[bool, str]:
        raise ValueError("two\nlines")

    def checks(setting: Any) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
        yield "bad", fail
        yield "good", lambda: (True, "fine")

    monkeypatch.setitem(check.PARTS, "x", check.Part(checks, 10))
    rows: list[Any] = []
    check.run_part("x", check.Setting("cpu", "llama-tiny", 256, 0.0), rows.append)
    assert [(row.name, row.result, row.passed) for row in rows] == [
        ("bad", "ValueError: two lines", False),
        ("good", "fine", True),
    ]


def test_processes_of_a_part_run_each_check_once(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU a part may have several processes, at most one for two processors."""
    monkeypatch.setitem(
        check.PARTS, "x", check.Part(lambda s: ((f"{at}", lambda: (True, "")) for at in range(7)), 10, 10, 8)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 6)

    def spawned(command: list[str], limit: float, path: Path, part: str) -> list[Any]:
        rows: list[Any] = []
        check.run_part(part, check.Setting("cpu", "llama-tiny", 256, 0.0), rows.append, Path(command[-1]))
        paths.add(path)
        return rows

    paths: set[Path] = set()
    monkeypatch.setattr(check, "spawned", spawned)
    found = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        rows = check.in_processes("x", check.Setting(device, "llama-tiny", 256, 0.0), 10, folder)
        found[device] = [row.name for row in rows]
    assert found["cpu"] == list("0123456") and sorted(found["cuda"]) == list("0123456")
    assert len(paths) == 4


def test_parts_fit_into_eight_minutes(check: Any) -> None:
    assert list(check.PARTS) == ["sessions", "attention", "speed", "answers", "tensorrt", "zoo"]
    for limits in ([part.limit for part in check.PARTS.values()], [part.cpu_limit for part in check.PARTS.values()]):
        assert sum(limits) <= check.TOTAL + 60 <= 9 * 60
    assert sum(part.limit for part in check.PARTS.values()) <= check.TOTAL < 8 * 60


@pytest.mark.parametrize("part", ["tensorrt", "zoo"])
def test_what_needs_a_gpu_says_so(check: Any, part: str) -> None:
    rows: list[Any] = []
    check.run_part(part, check.Setting("cpu", "llama-tiny", 256, 0.0), rows.append)
    assert [(row.result, row.passed) for row in rows] == [("needs a GPU", None)]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gemma"])
def test_sessions_are_compared_with_the_model(sessions: Any, model: str) -> None:
    oracle = sessions.Oracle(getattr(sessions, model), "cpu")
    ways = sessions.ways()
    uncompiled = ("eager", "draft model", "saved and loaded", "token id out of range", "offloaded, 10 responses")
    for way in (*uncompiled, "forked", "beams of 3"):
        assert ways[way](oracle)[0] is True, way
    # A wrong token and a wrong logit are found.
    oracle.tokens[5] += 1
    oracle.logits[30] += 1
    assert ways["eager"](oracle)[0] is False and oracle.generates(oracle.session()) == (False, "tokens differ")
    assert oracle.steps(oracle.session())[0] is False


def test_graphs_of_the_subprocess_are_compared(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says if the subprocess gave up, because this process then compiled what is compared."""
    run = sessions.ways()["compiled in the background, 4 steps a launch"]
    oracle = sessions.Oracle(sessions.tiny_llama, "cpu")
    with compiling_with("aot_eager"):
        passed, said = run(oracle)
    assert passed is None and "backend is 'aot_eager'" in said
    calls: list[str] = []

    class Made:
        def warm_up(self) -> None:
            calls.append("warm_up")
            if len(calls) > 2:
                warnings.warn("compiling in the background failed: no memory", RuntimeWarning, stacklevel=1)

        def close(self) -> None:
            calls.append("close")

    monkeypatch.setattr(oracle, "session", lambda **options: calls.append(options["compile"]) or Made())
    monkeypatch.setattr(oracle, "generates", lambda session: (True, "tokens equal"))
    assert run(oracle) == (True, "tokens equal")
    assert run(oracle) == (False, "tokens equal; compiling in the background failed: no memory")
    assert calls == ["background", "warm_up", "close"] * 2


def test_a_table_and_json_are_written(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {"speed": check.Row("speed", "a", "1 ms"), "zoo": check.Row("zoo", "b", "differs", False)}
    monkeypatch.setattr(check, "spawned", lambda command, limit, path, part: [found[part]])
    path = tmp_path / "build" / "x.json"
    with pytest.raises(typer.Exit) as ended:
        check.main(only=["speed", "zoo"], shape=None, length=None, total=470, json_path=path, part=None, seconds=1)
    assert ended.value.exit_code == 1
    document = json.loads(path.read_text())
    assert [row["name"] for row in document["rows"]] == ["a", "b"]
    assert document["machine"]["torch"] == torch.__version__.partition("+")[0] or "torch" in document["machine"]
    del found["zoo"]
    check.main(only=["speed"], shape=None, length=None, total=470, json_path=path, part=None, seconds=1)


# -- the benchmark -----------------------------------------------------------------------------------------------------


def test_forms_are_judged_by_the_spread(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = 10 * torch.randn(2, 6, 1000, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    assert loop.share_of_spread(expected + 0.1 * noise, expected) == pytest.approx(0.01, rel=0.05)
    assert loop.ALLOWED[torch.float32] < loop.ALLOWED[torch.float16] < loop.ALLOWED[torch.bfloat16]
    for name in ("copying", "reading"):
        monkeypatch.setattr(loop, name, lambda device: lambda: 1e9)
    model = loop.random_model("llama-tiny", 64)

    def right(model: Any, tokens: torch.Tensor, length: int) -> Callable[[int], torch.Tensor]:
        logits = model(tokens.expand(-1, 6)).logits
        return lambda position: logits[:, min(position, 5)]

    def measure(step: Callable[..., Any]) -> tuple[list[str], list[str]]:
        monkeypatch.setattr(loop, "our_step", step)
        wrong: list[str] = []
        with torch.no_grad():
            rows = loop.measure(
                "llama-tiny", model, 1, [8], 1, 1, Console(quiet=True), [loop.DYNAMIC, loop.OURS], wrong
            )
        return [row.form for row in rows], wrong

    assert measure(right) == ([loop.DYNAMIC, loop.OURS], [])
    forms, wrong = measure(lambda *given: lambda position: 1.01 * right(*given)(position))
    assert forms == [loop.DYNAMIC] and len(wrong) == 1
    assert "ours, compiled is wrong on llama-tiny: its logits are off by 1" in wrong[0]


def test_a_copy_shares_weights_but_not_the_config(loop: Any) -> None:
    model = loop.random_model("llama-tiny", 64)
    copied = loop._copy(model)
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    assert copied.config is not model.config and copied.model.layers[0] is not model.model.layers[0]


def test_responses_are_timed(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ANSWERS", ("ours, eager", "transformers dynamic"))
    made = []

    def make() -> Any:
        made.append(loop.random_model("llama-tiny", 64))
        return made[-1]

    ours, theirs = loop.time_answers("llama-tiny", make, 3, prompt_length=5, runs=1)
    assert len(made) == 2 and ours.peak_bytes is None and theirs.needed_bytes is None
    assert ours.needed_bytes > sum(parameter.nbytes for parameter in made[0].parameters())
    assert 0 < ours.cold_first_seconds <= ours.cold_seconds and theirs.cold_first_seconds is None
    assert min(ours.first_ms, theirs.first_ms, ours.tokens_per_second, theirs.tokens_per_second) > 0
    assert len(loop.answers_table([ours, theirs]).rows) == 2


@pytest.mark.parametrize(("peak", "passed"), [(None, None), (109, True), (120, False)])
def test_memory_of_a_response_is_judged(check: Any, loop: Any, peak: int | None, passed: bool | None) -> None:
    assert check._answer(loop.Answer("x", "ours", 1.0, 2.0, 3.0, 4.0, peak, 100))[0] is passed
    assert check._answer(loop.Answer("x", "theirs", None, 2.0, 3.0, 4.0, peak, None))[0] is None


def test_host_waits_are_counted_over_the_steps_alone(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU never waits; the steps run as they do on a GPU."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert sessions.waits(sessions.Oracle(sessions.tiny_llama, "cpu")) == (True, "0 in 9 steps ")
    assert modes == ["warn", "default"]


def test_a_host_wait_is_told_from_other_warnings(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns that the mode is a prototype, too."""
    oracle, said = sessions.Oracle(sessions.tiny_llama, "cpu"), ["Synchronization debug mode is a prototype feature"]
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: [warnings.warn(one, stacklevel=1) for one in said]
    )
    assert sessions.waits(oracle) == (True, "0 in 9 steps ")
    said.append("called a synchronizing CUDA operation")
    passed, result = sessions.waits(oracle)
    assert not passed and result.startswith("2 in 9 steps test_gpu_check.py:")


def test_shapes_have_their_parameters(loop: Any) -> None:
    """Models of 1B and 8B are those that people mean: 1.24 and 8.03 billion parameters."""
    for name, billions in (("llama-1b", 1.24), ("llama-8b", 8.03)):
        with torch.device("meta"):
            model = loop.random_model(name, 32768, "meta")
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


# -- TensorRT ----------------------------------------------------------------------------------------------------------


def test_a_captured_step_keeps_what_its_graph_reads(tensorrt: Any, loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    class Graph:
        def replay(self) -> None:
            assert all(tensor() is not None for tensor in read)

    class Stream:
        def wait_stream(self, other: object) -> None:
            """Wait for nothing."""

    class Runner:
        is_open = True

        def __init__(self, *given: object) -> None:
            """Take a model and a cache."""

        def run(self, method: str, *inputs: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(1)
            read.extend(map(weakref.ref, inputs))
            return logits

    for name, value in (("Stream", Stream), ("current_stream", Stream), ("CUDAGraph", Graph)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda captured: nullcontext())
    monkeypatch.setattr(tensorrt, "ModuleRunner", Runner)
    step = tensorrt.graphed_step(loop.random_model("llama-tiny", 64), 64)
    assert len(read) >= 2
    step(3)
    assert [tensor().flatten().tolist() for tensor in read[-2:]] == [[1], [3]]


@pytest.mark.parametrize("opens", [True, False])
def test_times_are_taken_even_if_a_check_fails(
    tensorrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    timed: list[tuple[torch.dtype, str, object]] = []

    class Opened:
        class Runner:
            methods: dict[str, object] = {}

        runner = Runner()

    class Built:
        class Manifest:
            files = ("decode.plan",)

        manifest, path = Manifest(), Path("missing")

    def build(*given: object) -> Built:
        if not opens:
            raise BundleError("no plan loads here")
        return Built()

    def forms_of(make: Callable[[], Any], length: int, engines: object, compared: bool) -> dict[str, object]:
        assert compared
        model = make()
        timed.append((model.dtype, model.config.model_type, engines))
        return {}

    def fail(*given: object) -> None:
        raise BundleError("logits differ")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 2))
    monkeypatch.setattr(tensorrt, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(tensorrt, "build", build)
    monkeypatch.setattr(tensorrt.Session, "from_bundle", lambda bundle: Opened())
    monkeypatch.setattr(tensorrt, "verify_session", fail)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *given: self)
    monkeypatch.setattr(tensorrt, "forms_of", forms_of)
    monkeypatch.setattr(tensorrt, "timed", lambda forms, positions, rounds, steps: {"form": {8: 1.0}})
    path = tmp_path / "x.json"
    with pytest.raises(typer.Exit) as ended:
        tensorrt.main(
            "demo", "float16", "llama-tiny", 32, rounds=1, steps=1, json_path=path, quantize=None, output=None
        )
    assert ended.value.exit_code == 1
    assert timed == [(torch.float16, "llama", Opened.runner if opens else None)]
    record = json.loads(path.read_text())
    assert record["milliseconds"] == {"form": {"8": 1.0}} and record["model"] == "llama-tiny"
    assert record["checks"]["run" if opens else "load"]["passed"] is False


def test_outstanding_checks_follow_their_builds(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU builds small shapes and says what is left; a GPU checks each bundle that was built, and no other."""
    calls: list[tuple[str, ...]] = []

    def script(*arguments: str, limit: float | None = None) -> Any:
        calls.append(arguments)
        failed = "--build-only" in arguments and "float16" in arguments
        return subprocess.CompletedProcess(arguments, int(failed), "built it", "no memory")

    monkeypatch.setattr(check, "_script", script)
    monkeypatch.setattr(check.util, "find_spec", lambda name: name)
    rows: list[Any] = []
    check.run_part("engines", check.Setting("cpu", "llama-tiny", 256, 0.0), rows.append)
    assert [row.name for row in rows] == list(check.OUTSTANDING)
    assert all("--build-only" in call and {"llama-tiny", "qwen3-moe-tiny"} & {*call} for call in calls)
    assert {row.result: row.passed for row in rows} == {"no plan: no memory": False, "built it; needs a GPU": None}
    monkeypatch.setattr(check, "_checked_plan", lambda *arguments: (True, " ".join(arguments)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    rows.clear()
    check.run_part("engines", check.Setting("cuda", "llama-1b", 4096, 0.0), rows.append)
    right = {row.name: row.result for row in rows if row.passed}
    newer = [name for name, one in check.OUTSTANDING.items() if {"fp8", "nvfp4"} & {*one}]
    assert [*right, *newer] == [name for name, one in check.OUTSTANDING.items() if "float16" not in one]
    assert {row.name for row in rows if "SM 90 does not load" in row.result and row.passed is None} == {*newer}
    assert all("--built" in result and "tiny" not in result for result in right.values())
    assert check.BY_NAME["engines"].limit < 600


def test_outstanding_checks_are_in_the_guide_and_have_options(check: Any, loop: Any, tensorrt: Any) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "tensorrt.md").read_text()
    command = typer.main.get_command(_app(tensorrt.main))
    for name, arguments in check.OUTSTANDING.items():
        assert f"| {name} |" in guide
        with command.make_context("x", list(arguments), resilient_parsing=False) as context:
            assert context.params["shape"] in loop.MODELS and check._TINY[context.params["shape"]] in loop.MODELS


def _app(main: Callable[..., None]) -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_a_shape_that_is_unknown_is_refused(tensorrt: Any) -> None:
    with pytest.raises(typer.BadParameter, match="must be one of llama-tiny.*got nonsense"):
        tensorrt.random_shape("nonsense", "float16", 32)
