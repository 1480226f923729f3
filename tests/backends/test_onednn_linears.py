"""Linear layers that oneDNN computes, in captured graphs and as they run, on any processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends.live import background
from exportable_cache.backends.live import background as background_worker
from exportable_cache.backends.live.layered import LayeredBackend
from exportable_cache.backends.live.ops import eager_operators, linear

from ..support.compiling import compiling_with
from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def without_our_kernel(monkeypatch) -> None:
    monkeypatch.setenv(linear.OPERATORS.variable, "torch")


@pytest.fixture
def better(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "onednn_is_better", lambda: True)
    with compiling_with("inductor"):
        yield


class Linears(nn.Module):
    """All forms that a graph may have of it; three are oneDNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased, self.low = nn.Linear(8, 6, bias=False), nn.Linear(6, 5), nn.Linear(5, 5).bfloat16()
        self.wide = nn.Parameter(torch.randn(5, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(input=self.biased(self.plain(x)), weight=torch.eye(5), bias=self.biased.bias)
        return nn.functional.linear(self.low(x.bfloat16()).float(), self.wide[:, ::2])


# As they run, below: the other shapes.
@pytest.mark.parametrize(
    "shape", [pytest.param((8,), marks=pytest.mark.full), (3, 8), pytest.param((2, 3, 8), marks=pytest.mark.full)]
)
def test_layers_of_every_form(better, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = Linears().eval(), torch.randn(shape)
    found = []

    def replaced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found.append(linear.linears_by_onednn(graph))
        return LayeredBackend()(graph, inputs)

    with torch.no_grad():
        got = torch.compile(module, backend=replaced, fullgraph=True)(x)
        assert found == [3]
        # One of the layers is of bfloat16.
        torch.testing.assert_close(got, module(x), atol=2e-2, rtol=2e-2)


@pytest.mark.full
def test_a_compiled_session_multiplies_by_it(better) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), compile="wait", prefill_chunk=16)
    counted = mock.Mock(side_effect=linear.linears_by_onednn)
    with mock.patch("exportable_cache.backends.live.layered.linears_by_onednn", counted):
        ids = tokens(30)

        def step(piece: torch.Tensor) -> torch.Tensor:
            return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

        assert difference(step, reference_logits(model, ids, 5), ids, 5) <= 1e-4
    assert counted.call_count == 2
    with torch.profiler.profile() as profile:
        session.decode(tokens(1)[:, 0])
    calls = {event.key: event.count for event in profile.key_averages()}
    # Seven of a layer, and the logits.
    assert calls["mkldnn::_linear_pointwise"] == 2 * 7 + 1
    assert not calls.keys() & {"aten::mm", "aten::addmm", "aten::linear"}


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)])
def test_layers_of_every_form_as_they_run(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = Linears().eval(), torch.randn(shape)
    with torch.no_grad():
        expected = module(x)
        with torch.profiler.profile() as profile, eager_operators(onednn=True):
            got = module(x)
    torch.testing.assert_close(got, expected)
    # One is called with names.
    assert {event.key: event.count for event in profile.key_averages()}["mkldnn::_linear_pointwise"] == 3


@pytest.mark.parametrize("is_better", [True, False])
def test_steps_that_wait_for_their_graph_multiply_by_it(is_better: bool, monkeypatch) -> None:
    monkeypatch.setattr(background, "onednn_is_better", lambda: is_better)
    monkeypatch.setattr(background_worker, "_CHILD", "import time; time.sleep(600)")
    model, ids = tiny_model("llama", num_hidden_layers=2), tokens(5)
    with compiling_with("inductor"):
        session = Session.from_model(model, ExportableCache.from_model(model, 64), compile="background")
    with session, torch.profiler.profile() as profile:
        torch.testing.assert_close(session.prefill(ids), reference_logits(model, ids, 5)[:, -1], atol=1e-4, rtol=0)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("mkldnn::_linear_pointwise", 0) == (2 * 7 + 1 if is_better else 0)


@pytest.mark.full
def test_machine_code_has_it(better, tmp_path: Path) -> None:
    counted = mock.Mock(side_effect=linear.linears_by_onednn)
    with mock.patch("exportable_cache.backends.aoti.package.linears_by_onednn", counted):
        bundle = export(tiny_model("llama", num_hidden_layers=1), target="aoti", output_dir=tmp_path, max_cache_len=32)
    assert bundle.manifest.verification["max_difference"] <= 1e-4
    assert counted.call_count == 2


@pytest.mark.parametrize(
    ("vendor", "expected"), [("AuthenticAMD", True), ("HygonGenuine", True), ("GenuineIntel", False), (None, False)]
)
def test_where_it_is_better(monkeypatch, vendor: str | None, expected: bool) -> None:
    monkeypatch.setattr(linear, "cpu_fields", lambda: {} if vendor is None else {"vendor_id": vendor})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert linear.onednn_is_better() is expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not linear.onednn_is_better()


def test_nothing_changes_where_it_is_not(monkeypatch) -> None:
    monkeypatch.setattr(linear, "onednn_is_better", lambda: False)
    graph = torch.fx.symbolic_trace(nn.Linear(3, 3))
    code = graph.code
    assert linear.linears_by_onednn(graph) == 0 and graph.code == code
