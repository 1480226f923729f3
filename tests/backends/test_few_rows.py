"""Linear layers of few rows by a kernel that is compiled for the processor: its numbers, and who calls it."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from exportable_cache import ExportableCache, Session
from exportable_cache.backends.live import background
from exportable_cache.backends.live.ops import eager_operators
from exportable_cache.backends.live.ops import linear as few_rows
from exportable_cache.common.fs.user_files import HOME_VARIABLE
from exportable_cache.common.native import machine_code
from exportable_cache.common.native.machine_code import MachineCode
from exportable_cache.common.process.tuning import torch_threads

from ..support.models import tiny_model, tokens
from ..support.oracle import difference, reference_logits
from .test_low_precision import SIZES, quantized_model

pytestmark = pytest.mark.skipif(not few_rows.OPERATORS.is_wanted(), reason="there is no C++ compiler")

#: [in, out]: neither is a multiple of a vector, both are, the least there are, and rows that are gone through in parts.
SHAPES = [(37, 29), (768, 48), (16, 12), (2085, 50)]
LAYERS = 2
#: Seven of a layer, and the logits.
LINEARS = 7 * LAYERS + 1
#: As calls in a graph: three over what attention reads are one, two of the network behind it are one.
CALLS = {"exportable_cache::few_rows_linear": 2 * LAYERS + 1, "exportable_cache::few_rows_linears": 2 * LAYERS}
OF_TORCH = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "mkldnn::_linear_pointwise"}


def tolerance(dtype: torch.dtype) -> float:
    """Of a sum, as a share of the largest one: one rounding of the result in bfloat16."""
    return 2e-6 if dtype == torch.float32 else 4e-3


def compare(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == expected.shape
    assert (got.double() - expected).abs().max() <= tolerance(dtype) * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), SHAPES)
def test_weights_in_float(loaded, size: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(out, size).to(dtype), torch.randn(out).to(dtype)
    for rows in (*range(1, 18), 33):
        x = torch.randn(rows, size).to(dtype)
        expected = x.double() @ weight.double().T
        for threads in (1, 2):
            with torch_threads(threads):
                compare(few_rows.plain_linear(x, weight, None), expected, dtype)
                compare(few_rows.plain_linear(x, weight, bias), expected + bias.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outs", [(48,), (29, 12, 100), (24, 500, 13, 24)])
def test_several_layers_of_the_same_rows(loaded, outs: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(out, 200).to(dtype) for out in outs]
    biases = [torch.randn(out).to(dtype) for out in outs]
    for rows in (1, 3, 8, 13):
        x = torch.randn(rows, 200).to(dtype)
        for threads in (1, 2, 3):
            with torch_threads(threads):
                plain, biased = (few_rows.plain_linears(x, weights, added) for added in ([], biases))
            for weight, bias, one, other in zip(weights, biases, plain, biased, strict=True):
                expected = x.double() @ weight.double().T
                compare(one, expected, dtype)
                compare(other, expected + bias.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), SHAPES)
def test_weights_in_8_bits(loaded, size: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    integers = torch.randint(-128, 128, (out, size), dtype=torch.int8)
    scale, bias = torch.rand(out, 1), torch.randn(out).to(dtype)
    for rows in (1, 2, 3, 7, 8, 13):
        x = torch.randn(rows, size).to(dtype)
        got = torch.ops.exportable_cache.few_rows_linear_int8(x, integers, scale, None, bias)
        compare(got, x.double() @ (integers * scale.double()).T + bias.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 64, 1024])
def test_groups_of_weights(loaded, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size, out = 3072, 29
    integers = torch.randint(-8, 8, (out, size), dtype=torch.int8)
    scale = torch.rand(out, size // group).to(dtype)
    zeros = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    for rows in (1, 5, 8):
        x = torch.randn(rows, size).to(dtype)
        parts = integers.double().unflatten(1, (-1, group))
        for one in (zeros, None):
            got = torch.ops.exportable_cache.few_rows_linear_int8(x, integers, scale, one)
            weight = (parts - (0 if one is None else one[..., None])) * scale.double()[..., None]
            compare(got, x.double() @ weight.flatten(1).T, dtype)


def test_any_form_of_input(loaded) -> None:
    torch.manual_seed(0)
    weight = torch.randn(20, 48)
    for x in (torch.randn(48), torch.randn(2, 3, 96)[..., ::2], torch.randn(48, 5).T, torch.randn(0, 48)):
        torch.testing.assert_close(few_rows.plain_linear(x, weight, None), x @ weight.T)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.ones(20, 40), None, "x is"),
        (torch.ones(48, 20).T, None, "without gaps"),
        (torch.ones(11, 48), None, "at least"),
        (torch.ones(20, 48, dtype=torch.float64), None, "float32 or bfloat16"),
        (torch.ones(20, 48, dtype=torch.int8), torch.ones(20, 3), "groups have"),
        (torch.ones(20, 48, dtype=torch.int8), torch.ones(21), "a scale for each group"),
    ],
)
def test_what_the_kernel_refuses(loaded, weight: torch.Tensor, scale: torch.Tensor | None, message: str) -> None:
    operators = torch.ops.exportable_cache
    with pytest.raises(RuntimeError, match=message):
        if scale is None:
            operators.few_rows_linear(torch.ones(1, 48), weight)
        else:
            operators.few_rows_linear_int8(torch.ones(1, 48), weight, scale)


X, WEIGHT, BIAS, WHOLE = torch.ones(1, 64), torch.ones(20, 64), torch.ones(20), torch.ones(20, 64, dtype=torch.int8)
SCALES = torch.ones(20, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("few_rows_linear", (X.double(), WEIGHT), "numbers are in float32 or bfloat16"),
        ("few_rows_linear", (X, WEIGHT, torch.ones(21)), "a bias, or a scale, has 20 numbers"),
        ("few_rows_linear", (X, WEIGHT, BIAS.double()), "numbers are in float32 or bfloat16"),
        ("few_rows_linear", (X, WEIGHT, torch.ones(40)[::2]), "without gaps"),
        ("few_rows_linears", (X, [], []), "a bias for each or none"),
        ("few_rows_linears", (X, [WEIGHT, WEIGHT], [BIAS]), "a bias for each or none"),
        ("few_rows_linears", (X, [WEIGHT], [BIAS, BIAS]), "a bias for each or none"),
        ("few_rows_linears", (X, [WEIGHT, WEIGHT.bfloat16()], []), "weights of one dtype"),
        ("few_rows_linear_int8", (X, WEIGHT, BIAS), "weights in int8"),
        ("few_rows_linear_int8", (X, WHOLE, BIAS.double()), "numbers are in float32 or bfloat16"),
        ("few_rows_linear_int8", (X, WHOLE, SCALES.double()), "numbers are in float32 or bfloat16"),
        ("few_rows_linear_int8", (X, WHOLE, SCALES, SCALES), "a zero point in int8 for each scale"),
        ("few_rows_linear_int8", (X, WHOLE, SCALES, WHOLE[:, :1]), "a zero point in int8 for each scale"),
        ("few_rows_linear_int8", (X, WHOLE, SCALES, WHOLE[:, :4:2]), "a zero point in int8 for each scale"),
    ],
)
def test_arguments_that_the_kernel_would_read_as_something_else(loaded, name: str, arguments, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.exportable_cache, name)(*arguments)


class Linears(nn.Module):
    """Four that the kernel computes, and others: of a view, of few outputs, of many rows, of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased, self.low = nn.Linear(32, 32, bias=False), nn.Linear(32, 32), nn.Linear(32, 32)
        self.low.bfloat16()
        self.wide, self.narrow = nn.Parameter(torch.randn(32, 64)), nn.Linear(32, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] == 2
        x = nn.functional.linear(input=self.biased(self.plain(x)), weight=torch.eye(32), bias=self.biased.bias)
        x = self.low(x.bfloat16()).float()
        many = self.plain(x.repeat(9, 1))[:2]
        return self.narrow(nn.functional.linear(x, self.wide[:, ::2]) + many)


def test_layers_that_are_replaced(loaded) -> None:
    """Sizes of a graph that are traced as symbols and turn out to be one number count as that."""
    module, found = Linears().eval(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found.append(few_rows.linears_of_few_rows(graph))
        return graph

    with torch.no_grad():
        x = torch.randn(2, 32)
        expected = module(x)
        for dynamic in (False, True):
            torch._dynamo.reset()
            got = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(x)
            torch.testing.assert_close(got, expected, atol=5e-2, rtol=5e-2)
    assert found == [4, 4]


class Joined(nn.Module):
    """Three over one input, two over another; others are of another layer, of computed weights, and of few outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, out, bias=False) for out in (32, 16, 48))
        self.gate, self.up, self.few = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 3, bias=False)
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, (other,) = self.q(x), self.k(x), self.v(x), (layer(x) for layer in self.layers)
        weight, bias = self.q.weight * 2, self.up.bias + 1
        further = [nn.functional.linear(x, weight), nn.functional.linear(q, self.gate.weight, bias)]
        return [q, k, v, other, self.gate(q), self.few(x), *further, self.up(q)]


def test_layers_of_the_same_rows_are_one_call(loaded) -> None:
    module, counts = Joined().eval(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found = few_rows.linears_of_few_rows(graph)
        calls = [node.target for node in graph.graph.nodes]
        counts.append((found, calls.count(few_rows.plain_linears), calls.count(few_rows.plain_linear)))
        return graph

    torch._dynamo.reset()
    x = torch.randn(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=backend, fullgraph=True)(x), module(x))
    assert counts == [(8, 2, 3)]


def calls_of(session: Session) -> dict[str, int]:
    """Operators of a decode step."""
    with torch.profiler.profile() as profile:
        session.decode(tokens(1)[:, 0])
    return {event.key: event.count for event in profile.key_averages()}


def test_a_compiled_step_calls_nothing_else(loaded, inductor, tmp_path) -> None:
    """Nor than the kernel for attention."""
    model, ids = tiny_model("mistral", num_hidden_layers=LAYERS, head_dim=16), tokens(30)
    options = {"compile": "wait", "prefill_chunk": 24, "graph_cache": tmp_path}
    session = Session.from_model(model, ExportableCache.from_model(model, 64), **options)
    # Past its window of 8. A prompt of one token is a step, so that one graph is compiled.
    assert difference(lambda piece: session.decode(piece[:, 0]), reference_logits(model, ids, 1), ids, 1) <= 1e-4
    assert session.runner.graph_cache.compiled == 1
    # Sizes were looked at before.
    assert not any(b"assert_size_stride(arg" in path.read_bytes() for path in tmp_path.glob("*.graph"))
    calls = calls_of(session)
    assert {name: calls[name] for name in CALLS} == CALLS and not calls.keys() & OF_TORCH
    assert calls["exportable_cache::few_queries_attention"] == LAYERS
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in calls


@pytest.mark.full
@pytest.mark.parametrize(("bits", "prompt"), [(8, 3), (4, 3)])
def test_quantised_weights_are_read_as_they_are(loaded, inductor, bits: int, prompt: int) -> None:
    model, ids = quantized_model(bits), tokens(12)
    logits = []
    for compile in (False, "wait"):
        session = Session.from_model(model, ExportableCache.from_model(model, 64), compile=compile)
        session.prefill(ids[:, :prompt])
        logits.append(torch.stack([session.decode(ids[:, index]) for index in range(prompt, 12)]))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4
    calls = calls_of(session)
    assert calls["exportable_cache::few_rows_linear_int8"] == 7 * SIZES["num_hidden_layers"] + 1
    assert not calls.keys() & OF_TORCH


def test_quantised_weights_of_a_graph_are_read_as_they_are(loaded) -> None:
    """Integers and scales are operands of the kernel: in the graph that the compiler is given."""
    model, x = quantized_model(8).model.layers[0].mlp, torch.randn(1, 1, SIZES["hidden_size"])
    found = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        found.append(few_rows.linears_of_few_rows(graph))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
        with torch.profiler.profile() as profile:
            compiled(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert found == [3] and calls["exportable_cache::few_rows_linear_int8"] == 3 and not calls.keys() & OF_TORCH


def test_weights_of_other_forms_are_left_to_torch(loaded) -> None:
    x = torch.randn(1, 64)
    weight = quantized_model(8).model.layers[0].mlp.up_proj.weight
    assert few_rows.linear_of_few_rows(x, weight) is not None
    weight.act_quant_kwargs = object()
    assert few_rows.linear_of_few_rows(x, weight) is None
    weight = quantized_model(4, 32).model.layers[0].mlp.up_proj.weight
    assert few_rows.linear_of_few_rows(x, weight) is not None
    assert few_rows.linear_of_few_rows(x, quantized_model(4, 16).model.layers[0].mlp.up_proj.weight) is None
    weight.zero_point = weight.zero_point.float()
    assert few_rows.linear_of_few_rows(x, weight) is None


@pytest.mark.parametrize("rows", [few_rows.MOST_ROWS, few_rows.MOST_ROWS + 1])
def test_layers_as_they_run(loaded, rows: int) -> None:
    layer, x = nn.Linear(32, 24), torch.randn(rows, 32)
    with torch.no_grad(), torch.profiler.profile() as profile, eager_operators(few_rows=True):
        got = layer(x)
    torch.testing.assert_close(got, layer(x))
    calls = {event.key for event in profile.key_averages()}
    assert ("exportable_cache::few_rows_linear" in calls) == (rows <= few_rows.MOST_ROWS)


def test_steps_that_wait_for_their_graph_call_it(loaded, inductor, monkeypatch) -> None:
    monkeypatch.setattr(background, "_CHILD", "import time; time.sleep(600)")
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    session = Session.from_model(model, ExportableCache.from_model(model, 64), compile="background")
    with session:
        session.prefill(tokens(3))
        assert calls_of(session)["exportable_cache::few_rows_linear"] == LINEARS


def a_library(folder: Path, monkeypatch, source: str = "int one = 1;") -> MachineCode:
    monkeypatch.setenv(HOME_VARIABLE, str(folder / "home"))
    (folder / "one.cpp").write_text(source)
    return MachineCode(folder / "one.cpp")


def test_what_is_compiled_is_kept(tmp_path, monkeypatch) -> None:
    assert not a_library(tmp_path, monkeypatch).load(compiles=False)
    assert a_library(tmp_path, monkeypatch).load()
    monkeypatch.setattr(machine_code, "cpp_compiler", lambda: "")
    code = a_library(tmp_path, monkeypatch)
    assert code.can_be_loaded() and code.load() and code.load()
    assert not a_library(tmp_path, monkeypatch, "int two = 2;").can_be_loaded()


def test_what_has_begun_is_waited_for_also_by_a_fork(tmp_path, monkeypatch) -> None:
    code = a_library(tmp_path, monkeypatch)
    code.begin()
    # Nobody compiles it again.
    monkeypatch.setattr(MachineCode, "_compile", lambda self: pytest.fail("it is compiled twice"))
    code.begin()
    fork = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not code.load()))
    fork.start()
    fork.join()
    assert fork.exitcode == 0 and code.load()
    assert [path.name for path in code.path.parent.iterdir()] == [code.path.name]


def test_what_has_begun_and_fails_is_told_by_the_compiler(tmp_path, monkeypatch) -> None:
    code = a_library(tmp_path, monkeypatch, "int one = ;")
    code.begin()
    assert not code.load() and "error: expected" in code.reason
    assert not list(code.path.parent.iterdir())


@pytest.mark.skipif(not machine_code.HAS_OWNERS, reason="the system has no owners")
def test_what_others_can_write_to_is_not_loaded(tmp_path, monkeypatch) -> None:
    code = a_library(tmp_path, monkeypatch)
    assert code.load()
    code.path.chmod(0o666)
    other = a_library(tmp_path, monkeypatch)
    assert not other.load() and "be writable by you only" in other.reason
    code.path.chmod(0o700)
    code.path.parent.chmod(0o777)
    assert not a_library(tmp_path, monkeypatch).load()


def test_without_a_compiler_torch_computes(tmp_path, monkeypatch, caplog) -> None:
    for compiler in ("no-compiler", "false"):
        monkeypatch.setenv("CXX", compiler)
        code = a_library(tmp_path, monkeypatch)
        monkeypatch.setattr(few_rows.OPERATORS, "code", code)
        graph = torch.fx.symbolic_trace(nn.Linear(32, 32))
        for node, shape in zip(graph.graph.nodes, ((1, 32), (32, 32), (32,), (1, 32))):
            node.meta["example_value"] = torch.randn(shape)
        with caplog.at_level(logging.WARNING):
            assert few_rows.linears_of_few_rows(graph) == 0 == few_rows.linears_of_few_rows(graph)
        assert not few_rows.OPERATORS.is_wanted()
    (line,) = caplog.messages
    assert "torch's operators are used" in line and "ends with 1" in line
