"""CUDA graphs of steps, over a stand-in for CUDA's that records a call and repeats it on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import compile as compile_file
from exportable_cache.backends.live import runner as runner_file
from exportable_cache.backends.live.cuda_graphs import CudaGraphs

from ..support.models import tiny_model

CPU = torch.device("cpu")


class Gpu:
    """Stand-in for the functions of `torch.cuda` that capture. A replay calls the captured function again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replays, self.captures = 0, 0
        self.error: RuntimeError | None = None
        self.work: Any = None
        self.devices: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self.Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
        monkeypatch.setattr(torch.cuda, "device", self.current)

    class Graph:
        """A captured call, with the tensors it was captured over."""

        def __init__(self, gpu: Gpu) -> None:
            self.gpu = gpu
            self.again: Any = None

        def replay(self) -> None:
            """Call the captured function again over the same tensors, on the current device."""
            assert self.gpu.devices
            self.gpu.replays += 1
            self.again()

    @contextlib.contextmanager
    def current(self, device: torch.device) -> Any:
        """Make a device the current one."""
        self.devices.append(device)
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def capture(self, graph: Gpu.Graph, pool: object, stream: object, capture_error_mode: str) -> Any:
        """Note that calls in this block are captured."""
        if self.error is not None:
            raise self.error
        assert self.work is None and stream == ("stream", self.devices[-1])
        self.captures += 1
        self.work = graph
        yield
        self.work = None

    def step(self, function: Any) -> Any:
        """Return a compiled step over the stand-in: captured calls compute nothing, and replays overwrite results."""

        launched: list[torch.Tensor] = []

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            if self.work is None:
                launched.append(function(*inputs))
                return launched[-1]
            result = torch.zeros_like(launched[-1])

            @torch.inference_mode()
            def again() -> None:
                # No operator of torch: a graph writes memory in any mode.
                result.copy_(function(*inputs))

            self.work.again = again
            return result

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Return a stand-in for CUDA's capture."""
    return Gpu(monkeypatch)


def test_a_step_is_captured_at_its_second_call_and_replayed(gpu: Gpu) -> None:
    """Results are copies, because a replay overwrites those of the one before."""
    model = torch.nn.Linear(2, 2, bias=False)
    graphs, step = CudaGraphs(model, CPU), gpu.step(lambda given: given * 2)
    inputs = [[torch.tensor([float(value)])] for value in range(4)]
    assert graphs.replay("step", inputs[0]) is None
    found = [graphs.run("step", step, inputs[0]), graphs.run("step", step, inputs[1])]
    assert (gpu.captures, gpu.replays) == (1, 1)
    found += [graphs.replay("step", inputs[2]), graphs.replay("step", inputs[3])]
    assert torch.cat(found).tolist() == [0, 2, 4, 6]
    assert (gpu.captures, gpu.replays) == (1, 3)
    assert graphs.replay("another", inputs[0]) is None


def test_inputs_of_another_form_are_not_replayed(gpu: Gpu) -> None:
    """A graph has one size, one dtype and one device."""
    graphs, step = CudaGraphs(torch.nn.Identity(), CPU), gpu.step(lambda given: given + 1)
    for _ in range(2):
        graphs.run("step", step, [torch.zeros(3)])
    others = ([torch.zeros(4)], [torch.zeros(3, dtype=torch.int64)], [torch.zeros(3, device="meta")], [])
    assert [graphs.replay("step", inputs) for inputs in others] == [None] * 4
    # A tensor elsewhere would be read while the graph is captured, and never again.
    assert graphs.run("other", step, [torch.zeros(3, device="meta")]).device.type == "meta"
    assert graphs.run("other", step, [torch.zeros(3, device="meta")]).device.type == "meta"
    assert gpu.captures == 1


@pytest.mark.parametrize("change", ["moved", "replaced", "deleted", "another module"])
def test_weights_elsewhere_end_a_graph(gpu: Gpu, change: str) -> None:
    """The graph would read the memory where they were."""
    whole = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    model = whole[0]
    graphs, step = CudaGraphs(whole, CPU), gpu.step(lambda given: given + 1)
    for _ in range(2):
        graphs.run("step", step, [torch.zeros(1)])
    if change == "moved":
        model.weight.data = torch.ones(1, 1)
    elif change == "replaced":
        model.weight = torch.nn.Parameter(torch.ones(1, 1))
    elif change == "another module":
        whole[0] = torch.nn.Linear(1, 1, bias=False)
    else:
        del model.weight
    assert graphs.replay("step", [torch.zeros(1)]) is None
    # It runs once before it is captured again, because it may be compiled again.
    assert graphs.run("step", step, [torch.zeros(1)]).item() == 1 and gpu.captures == 1
    assert graphs.run("step", step, [torch.zeros(1)]).item() == 1 and gpu.captures == (1 if change == "deleted" else 2)


def test_another_form_or_call_runs_before_it_is_captured(gpu: Gpu) -> None:
    """The step may be compiled again for it, which cannot be captured."""
    graphs, step = CudaGraphs(torch.nn.Identity(), CPU), gpu.step(lambda given: given + 1)
    graphs.run("step", step, [torch.zeros(1)])
    assert graphs.run("step", step, [torch.zeros(2)]).tolist() == [1, 1] and gpu.captures == 0
    again = gpu.step(lambda given: given + 2)
    assert graphs.run("step", again, [torch.zeros(2)]).tolist() == [2, 2] and gpu.captures == 0
    assert graphs.run("step", again, [torch.zeros(2)]).tolist() == [2, 2] and gpu.captures == 1


def test_inference_mode_may_begin_and_end_between_steps(gpu: Gpu) -> None:
    """Tensors that were made in it can only be written in it."""
    for first, later in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        graphs, step = CudaGraphs(torch.nn.Identity(), CPU), gpu.step(lambda given: given + 1)
        with first():
            for _ in range(2):
                graphs.run("step", step, [torch.zeros(1)])
        with later():
            assert graphs.replay("step", [torch.ones(1)]).item() == 2


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_a_step_that_cannot_be_captured_is_launched(
    gpu: Gpu, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]
) -> None:
    """It is tried once, and said once. A lack of memory for the graph is none for the step."""
    graphs, step = CudaGraphs(torch.nn.Identity(), CPU), gpu.step(lambda given: given + 1)
    gpu.error = error("no capture")
    assert [graphs.run("step", step, [torch.zeros(1)]).item() for _ in range(3)] == [1, 1, 1]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "steps cannot be captured as CUDA graphs, and are launched kernel by kernel"
    ]


def test_a_session_replays_its_steps(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are captured, with or without the choice of a token, and prompts are not."""
    for file in (compile_file, runner_file):
        monkeypatch.setattr(file, "generates_cuda", lambda device, mode: True)
    monkeypatch.setattr(torch, "compile", lambda step, **options: gpu.step(step))
    monkeypatch.setattr(compile_file, "generates_code", lambda device: False)
    monkeypatch.setattr(runner_file, "shared_methods", lambda cache, methods: {})
    model = tiny_model("gemma3_text")
    plain = Session.from_model(model, ExportableCache.from_model(model, 64))
    prompt = torch.randint(0, model.config.vocab_size, (1, 9))
    expected = list(plain.generate(prompt, 20))
    plain.close()
    with Session.from_model(model, ExportableCache.from_model(model, 64), compile="wait", buckets=False) as session:
        assert list(session.generate(prompt, 20)) == expected
        # Of 19 steps the first is launched, and the second is captured.
        assert (gpu.captures, gpu.replays) == (1, 18)
        session.reset()
        logits = session.prefill(prompt)
        for token in expected[:3]:
            logits = session.decode(torch.tensor([token]))
        assert logits.argmax().item() == expected[3]
        assert (gpu.captures, gpu.replays) == (2, 20)
