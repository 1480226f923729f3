"""Programs for other delegates: what is in the file, what verification says of them, and what is not offered."""

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportable_cache import ExportableCache, export, load
from exportable_cache.backends import backend_for
from exportable_cache.backends.executorch.delegates import table
from exportable_cache.backends.executorch.delegates.table import DELEGATES
from exportable_cache.errors import BundleError, InputError, MissingDependencyError, UnsupportedModelError
from exportable_cache.models.experts import EXPERT_LINEAR
from exportable_cache.models.quantization.quantize import check_quantizable
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.program.decoders import methods_for
from exportable_cache.program.methods import ProgramMethod, chunk_sizes
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import tiny_model
from ..support.seq2seq import tiny_seq2seq

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.exir._serialize._program import deserialize_pte_binary

from exportable_cache.backends.executorch.delegates import mlx, openvino
from exportable_cache.backends.executorch.delegates.checks import check_cache
from exportable_cache.backends.executorch.delegates.passes import (
    choices_to_comparisons,
    empties_to_zeros,
    floor_divisions_to_floors,
    infinite_bounds_to_none,
    keep_state_outside,
    logic_to_bits,
    maxima_to_parts,
    numbers_to_tensors,
    remainders_to_divisions,
    short_means_to_sums,
    slices_to_bounds,
    sums_to_dtypes,
    tables_to_selections,
)
from exportable_cache.backends.executorch.pte.instructions import called_delegates
from exportable_cache.common.compat.executorch import operator_of

ROOT = Path(__file__).parents[2]


def plans(path: Path) -> dict:
    program = deserialize_pte_binary(path.read_bytes()).program
    return {plan.name: plan for plan in program.execution_plan}


# In the fast lane delegate "tensorrt" stands for programs that are not run here: test_executorch_tensorrt.
@pytest.mark.full
@pytest.mark.parametrize(
    ("delegate", "backend", "calls", "cache_outside"),
    [("coreml", "CoreMLBackend", 1, False), ("vulkan", "VulkanBackend", 3, True)],
)
def test_programs_for_devices_are_compiled_and_not_claimed_to_have_run(
    delegate: str, backend: str, calls: int, cache_outside: bool, tmp_path: Path
) -> None:
    if delegate == "coreml":
        pytest.importorskip("coremltools")
    model = tiny_model("llama", num_hidden_layers=1)
    bundle = export(model, "executorch", 32, tmp_path / "out", delegate=delegate, prefill_chunk=1)
    path = bundle.path / "program.pte"
    assert called_delegates(path) == {backend}
    plan = plans(path)["decode"]
    assert len(plan.delegates) == calls
    # The cache: written in place by a portable kernel, or state inside the one model.
    assert sum(plan.non_const_buffer_sizes[2:]) == (bundle.manifest.cache_bytes - 8 if cache_outside else 0)
    assert [operator.name for operator in plan.operators].count("aten::index_put_") == (1 if cache_outside else 0)
    assert bundle.manifest.files["program.pte"].holds.endswith(f"calls of {backend}: {calls} in decode")
    recorded = bundle.manifest.verification
    assert recorded["passed"]
    assert recorded["remark"].startswith(
        f"the XNNPACK lowering of the same exported program was run; the program for {backend} is not executed here"
    )
    with pytest.raises(
        BundleError, match=f"program.pte is for {backend}, which the ExecuTorch runtime of this machine lacks"
    ):
        load(bundle.path)


@pytest.mark.parametrize("delegate", ["coreml", "vulkan"])
def test_methods_that_a_delegate_cannot_share_a_cache_among_are_refused(delegate: str, tmp_path: Path) -> None:
    """They are refused before the model is loaded: there is none."""
    with pytest.raises(InputError, match=f"prefill_chunk must be 1 for delegate {delegate!r}, got the default"):
        export(tmp_path / "none", "executorch", 32, tmp_path / "out", delegate=delegate)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("delegate", ["openvino", "mlx"])
def test_packages_are_missed_before_a_model_is_loaded(
    delegate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler, and the evaluator if the program is verified."""
    monkeypatch.setattr("exportable_cache.common.compat.executorch.available_backends", set)
    monkeypatch.setattr(table, "_wrong", lambda packages: iter(packages))
    with pytest.raises(MissingDependencyError, match=f"delegate {delegate!r} needs {delegate}<"):
        export(tmp_path / "none", "executorch", 32, tmp_path / "out", delegate=delegate)


@pytest.mark.parametrize("name", ["none", "qnn", "XNNPACK", ""])
def test_other_names_are_refused_with_what_is_offered(name: str) -> None:
    offered = "xnnpack, openvino, mlx, tosa, vulkan, coreml, tensorrt"
    with pytest.raises(InputError, match=f"delegate must be one of {offered}, got '{name}'"):
        backend_for("executorch").options.parse({"delegate": name})


def test_options_of_one_delegate_are_not_those_of_another() -> None:
    with pytest.raises(InputError, match="delegate 'vulkan' has no option 'llm_runner'; it knows delegate$"):
        backend_for("executorch").options.parse({"delegate": "vulkan", "llm_runner": True})


@pytest.mark.parametrize(
    ("delegate", "scheme", "message"),
    [
        ("mlx", ("8da4w",), "quantize must be '4w' or '8w' for delegate 'mlx', got '8da4w'; use '4w' or '8w', or use"),
        ("openvino", ("keep",), "quantize must be '4w' or '8w' for delegate 'openvino', got 'keep'"),
        ("openvino", (None, None, "8w"), "quantize must be '4w' or '8w' for delegate 'openvino', got None"),
        ("mlx", ("4w", 96), "group_size must be one of 32, 64, 128 for delegate 'mlx', got 96; pass one of them"),
        ("tosa", ("8da4w",), "quantize must be None for delegate 'tosa', got '8da4w'; leave it out, or use delegate"),
        ("vulkan", ("8w",), "quantize must be a scheme that target 'executorch' has fast kernels for, got '8w'"),
    ],
)
def test_schemes_that_a_delegate_does_not_take(delegate: str, scheme: tuple, message: str, tmp_path: Path) -> None:
    """They are refused before the model is loaded: there is none."""
    names = "quantize", "group_size", "quantize_embeddings"
    options = dict(zip(names, scheme, strict=False)) | ({"form": "static"} if delegate == "tosa" else {})
    with pytest.raises(InputError, match=message):
        export(tmp_path / "none", "executorch", 32, tmp_path / "out", delegate=delegate, **options)


@pytest.mark.parametrize("delegate", ["mlx", "openvino"])
def test_encoder_decoders_are_refused_by_name(delegate: str) -> None:
    model, backend = tiny_seq2seq("t5"), backend_for("executorch")
    spec = backend.program_spec(ProgramSpec(), backend.options.parse({"delegate": delegate}))
    with pytest.raises(UnsupportedModelError, match=f"output, which delegate '{delegate}' .* for delegate 'xnnpack'"):
        Program(model, ExportableCache.from_model(model, 32, max_encoder_len=8), spec)


def test_rows_that_groups_do_not_divide_are_refused() -> None:
    """MLX multiplies groups of at least 32 weights of 8 bits, too."""
    model = tiny_model("llama", hidden_size=48, head_dim=12)
    taken = Quantization("8w", None, "8w")
    check_quantizable(model, taken)
    with pytest.raises(UnsupportedModelError, match="rows of .* of LlamaForCausalLM must be a multiple of 32.*got 48"):
        check_quantizable(model, taken.for_target("affine", (), largest_group=128))
    for size, remedy in ((192, r"use a group_size of 32 or 64 \("), (144, "leave quantize out, or export for another")):
        model = tiny_model("llama", hidden_size=size, head_dim=size // 4, intermediate_size=size)
        with pytest.raises(InputError, match=f"{size} weights long, got 128; {remedy}"):
            check_quantizable(model, Quantization("4w", 128).for_target("affine", (), largest_group=128))


class Quantized(torch.nn.Module):
    """A table, a head that is tied to it, and experts, with random integers of 4 or 8 bits."""

    def __init__(self, bits: int, groups: int) -> None:
        super().__init__()
        self.most, self.size = 2 ** (bits - 1), 64 // groups
        shapes = {"table": (9, 64), "experts": (3, 64, 64)}
        for name, shape in shapes.items():
            integers = torch.randint(-self.most, self.most, shape, dtype=torch.int8)
            scales = torch.rand(*shape[:-1], groups) / self.most
            setattr(self, name, torch.nn.Parameter(integers, requires_grad=False))
            setattr(self, f"{name}_scale", torch.nn.Parameter(scales, requires_grad=False))
        # As a tied head, a parameter of its own over the same memory.
        self.head = torch.nn.Parameter(self.table.data, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.randn(3, 64))
        self.register_buffer("zero", None)

    def weight(self, integers: torch.Tensor) -> torch.Tensor:
        parts = integers, [1, self.size], self.table_scale, self.zero
        return torch.ops.torchao.dequantize_affine(*parts, torch.int8, -self.most, self.most - 1)

    def forward(self, ids: torch.Tensor, indices: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.nn.functional.embedding(ids, self.weight(self.table))
        parts = self.experts, self.experts_scale, self.bias, indices
        inner = EXPERT_LINEAR(rows, *parts, None, False, False)
        return torch.nn.functional.linear(rows, self.weight(self.head)), EXPERT_LINEAR(
            inner, *parts, factors, False, False
        )


INPUTS = torch.tensor([3, 8, 0, 1]), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]]), torch.rand(4, 2)


@pytest.mark.parametrize(("bits", "groups"), [(8, 1), (4, 2), (4, 1)])
def test_openvino_gets_integers_without_a_sign(bits: int, groups: int) -> None:
    """Tables, tied heads and experts have the same values as before, and are stored once, in 4 or 8 bits."""
    module = Quantized(bits, groups)
    program = torch.export.export(module, INPUTS)
    expected = program.module()(*INPUTS)
    program = openvino.weights_to_unsigned(program)
    left = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not left & {"torchao.dequantize_affine.default", "exportable_cache.expert_linear.default"}
    used = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder") if node.users]
    assert sum(one.nbytes for one in used if one.dtype == torch.uint8) == (9 * 64 + 3 * 64 * 64) * bits // 8
    assert not any(one.dtype == torch.int8 for one in used)
    for found, wanted in zip(program.module()(*INPUTS), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    module.zero = torch.ones(9, groups, dtype=torch.int8)
    with pytest.raises(UnsupportedModelError, match="zero points of p_table must be zero for delegate 'openvino'"):
        openvino.weights_to_unsigned(torch.export.export(module, INPUTS))


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_gets_integers_of_experts(bits: int) -> None:
    """Their products with gathered weights are the experts' layers."""
    module = Quantized(bits, 2 if bits == 4 else 1)
    program = torch.export.export(module, INPUTS)
    expected = program.module()(*INPUTS)
    program = mlx.experts_to_gathers(program)
    calls = program.graph.find_nodes(op="call_function", target=torch.ops.mlx.gather_qmm.default)
    assert [call.args[7:9] for call in calls] == [(32 if bits == 4 else 64, bits)] * 2
    for found, wanted in zip(program.module()(*INPUTS), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not DELEGATES["openvino"].is_lowered_here, reason="the openvino extra is not installed")
@pytest.mark.parametrize(("scheme", "bits"), [("4w", 5), pytest.param("8w", 8.5, marks=pytest.mark.full)])
def test_openvino_executes_quantized_weights(scheme: str, bits: float, tmp_path: Path) -> None:
    """The program has few bits for a weight in each method, the sizes of the preview, and the model's logits."""
    model = tiny_model("mixtral", hidden_size=64, intermediate_size=64, vocab_size=4096, num_hidden_layers=1)
    options = {"delegate": "openvino", "quantize": scheme, "quantize_embeddings": scheme, "prefill_chunk": 8}
    preview = export(model, "executorch", 48, tmp_path / "out", dry_run=True, **options)
    bundle = export(model, "executorch", 48, tmp_path / "out", **options)
    assert bundle.manifest.verification["passed"] and bundle.manifest.verification["max_difference"] < 1e-4
    assert preview.weights_bytes == bundle.manifest.weights_bytes < 2 * model.num_parameters() * (bits + 0.3) / 8
    size = (bundle.path / "program.pte").stat().st_size
    assert bundle.manifest.weights_bytes < size < bundle.manifest.weights_bytes + 600_000


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, r"delegate 'openvino' needs openvino<2026,>=2025.1, which is not installed"),
        ({"openvino": "2026.1"}, r"delegate 'openvino' needs openvino.*, and 2026.1 is installed"),
    ],
)
def test_a_compiler_that_is_not_installed_is_named_with_its_extra(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(table.metadata, "version", version)
    with pytest.raises(MissingDependencyError, match=rf"{message}; pip install 'exportable-cache\[openvino\]'"):
        DELEGATES["openvino"].module()
    assert not DELEGATES["openvino"].is_lowered_here


def test_extras_install_what_delegates_need() -> None:
    """The table and pyproject.toml name the same packages and releases."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for delegate in DELEGATES.values():
        for package in delegate.compiler + delegate.evaluator if delegate.extra != "executorch" else ():
            (extra,) = re.findall(rf"^{delegate.extra} = \[(.*)\]$", project, re.MULTILINE)
            assert f'"{package}' in extra.replace("[cpu]", ""), package


@pytest.mark.parametrize(("chunk", "expected"), [(None, 32), (8, 8), (1, None)])
def test_chunks_of_one_length(chunk: int | None, expected: int | None) -> None:
    """A prompt is fed in chunks of exactly that length, and the rest token by token."""
    cache = ExportableCache.from_model(tiny_model("llama", num_hidden_layers=1), 64)
    methods = methods_for(cache, ProgramSpec(chunk, fixed_chunk=True))
    if expected is None:
        assert list(methods) == ["decode"]
        return
    assert (methods["prefill"].min_length, methods["prefill"].max_length) == (expected, expected)
    assert not methods["prefill"].dynamic_sizes
    assert chunk_sizes(methods, expected + 3) == [expected, 1, 1, 1]


def test_a_capacity_below_the_default_chunk() -> None:
    """The chunk is then as long as a row."""
    cache = ExportableCache.from_model(tiny_model("llama", num_hidden_layers=1), 16)
    assert methods_for(cache, ProgramSpec(fixed_chunk=True))["prefill"].max_length == 16


def plan(calls: int, outside: int) -> SimpleNamespace:
    """Return a lowered program with a method `forward`, as far as `check_cache` reads it."""
    plan = SimpleNamespace(
        name="forward",
        delegates=[None] * calls,
        non_const_buffer_sizes=[0, 100, outside],
        operators=[SimpleNamespace(name="aten::scatter")],
    )
    return SimpleNamespace(executorch_program=SimpleNamespace(execution_plan=[plan]))


@pytest.mark.parametrize(("calls", "outside"), [(2, 0), (1, 64)])
def test_a_program_that_is_cut_apart_is_refused_with_counts(calls: int, outside: int) -> None:
    state = [("layers.0.keys", torch.zeros(16)), ("layers.0.cumulative_length", torch.zeros(1))]
    program = SimpleNamespace(cache=SimpleNamespace(named_state=lambda: state), methods={"forward": None})
    counts = f"'mlx' splits forward into {calls} calls with {outside} of 64 bytes.*expected 1 call and 0"
    with pytest.raises(
        UnsupportedModelError, match=f"{counts}; the runtime would compute aten::scatter;.*--allow-partial"
    ):
        check_cache(DELEGATES["mlx"], program, plan(calls, outside))
    check_cache(DELEGATES["mlx"], program, plan(calls, outside), allow_partial=True)
    check_cache(DELEGATES["mlx"], program, plan(1, 0))


def test_numbers_of_where_are_tensors() -> None:
    """MLX's compiler takes no others, and would leave the operator to the runtime."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.where(x > 0, 1.0, 2.0), torch.where(x > 0, x, 2.0)

    x = torch.tensor([1.0, -1.0])
    graph_module = numbers_to_tensors(torch.export.export(Module(), (x,)).graph_module).graph_module
    calls = [str(operator_of(node.target)) for node in graph_module.graph.nodes if node.op == "call_function"]
    assert calls.count("aten.where.self") == 2 and not any("where.Scalar" in call for call in calls)
    assert [one.tolist() for one in graph_module(x)] == [[1.0, 2.0], [1.0, 2.0]]


def test_choices_of_experts_without_gathers() -> None:
    """A router's gathers and scatters are comparisons for any number of tokens; those along tokens are left."""

    class Module(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
            chosen = scores.topk(2, dim=-1).indices
            weights = scores.gather(1, chosen)
            groups = torch.zeros_like(scores).scatter(1, chosen[:, :1], 1.0)
            written = torch.zeros_like(scores)
            written.scatter_(-1, chosen, weights)
            types = torch.arange(6)[None].expand(scores.shape[0], 6).gather(1, chosen)
            return weights, groups, written, types, scores.gather(0, chosen.new_zeros(1, 6))

    tokens = torch.export.Dim("tokens", min=2, max=16)
    scores = torch.randn(5, 6).masked_fill(torch.arange(6) == 3, float("-inf"))
    program = torch.export.export(Module(), (scores,), dynamic_shapes=({0: tokens},))
    rewritten = choices_to_comparisons(program)
    calls = [str(node.target) for node in rewritten.graph.nodes if node.op == "call_function"]
    assert calls.count("aten.gather.default") == 1 and not any("scatter" in call for call in calls)
    for given in (scores, scores[:3]):
        for found, expected in zip(rewritten.module()(given), Module()(given), strict=True):
            assert torch.equal(found, expected)
    assert choices_to_comparisons(rewritten).graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)


def test_forms_that_mlx_takes() -> None:
    """Slices state their ends, tables are indexed by vectors, integers divided by numbers, for any number of tokens."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(9, 4))

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            joined = torch.cat([ids, ids], dim=1)
            divided = torch.div(ids - 4, 3, rounding_mode="floor")
            summed = ids.sum(-1, dtype=torch.float32)
            return (
                joined[:, -ids.shape[1] :],
                joined[:, 1:],
                self.table[ids],
                self.table[ids[0, :, None] - ids.clamp(max=0)],
                (ids - 4) // 2,
                (ids + 2**30) // 3,
                divided,
                (ids - 4) // -3,
                summed,
                *joined.max(-1),
            )

    tokens = torch.export.Dim("tokens", min=2, max=16)
    ids = torch.arange(5)[None]
    program = torch.export.export(Module(), (ids,), dynamic_shapes=({1: tokens},))
    rewrites = slices_to_bounds, tables_to_selections, floor_divisions_to_floors, sums_to_dtypes, maxima_to_parts
    for rewrite in rewrites:
        program = rewrite(program)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(len(node.args) >= 4 for node in calls if node.target is torch.ops.aten.slice.Tensor)
    assert not any("dtype" in node.kwargs for node in calls if node.target is torch.ops.aten.sum.dim_IntList)
    left = {str(node.target) for node in calls}
    assert not left & {
        "<built-in function neg>",
        "aten.index.Tensor",
        "aten.floor_divide.default",
        "aten.div.Tensor_mode",
        "aten.max.dim",
    }
    for given in (ids, ids[:, :3]):
        for found, expected in zip(program.module()(given), Module.forward(program.module(), given), strict=True):
            assert torch.equal(found, expected)


def test_uninitialized_tensors_are_zeros() -> None:
    """A compiler without `empty` takes them whole."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.empty(2, 3, dtype=torch.int64) * 0 + x

    program = torch.export.export(Module(), (torch.ones(3),)).run_decompositions({})
    graph_module = empties_to_zeros(program.graph_module).graph_module
    calls = [str(operator_of(node.target)) for node in graph_module.graph.nodes if node.op == "call_function"]
    assert "aten.full.default" in calls and not any("empty" in call for call in calls)
    assert graph_module(torch.ones(3))[0].dtype == torch.float32


def test_logic_is_of_bits() -> None:
    """OpenVINO's partitioner takes no logical operators of tensors, and no `expm1`."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            small = torch.expm1(x.bfloat16() / 256)
            return torch.logical_and(x > 0, x < 2), torch.logical_or(x > 2, x < 0), torch.expm1(x), small

    x = torch.tensor([-2.0, 0.5, 3.0])
    program = logic_to_bits(torch.export.export(Module(), (x,)))
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not calls & {"aten.logical_and.default", "aten.logical_or.default", "aten.expm1.default"}
    for found, expected in zip(program.module()(x), Module()(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_openvino_gets_no_infinite_bounds() -> None:
    """It writes them to a file, and reads 0 from there, so that every value would be 0."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inf = float("inf")
            return x.clamp(0.0, inf), x.clamp(-inf, 1.0), x.clamp(inf, None), x.clamp(-inf, inf) * 2

    x = torch.tensor([-2.0, 0.5, 3.0])
    graph_module = infinite_bounds_to_none(torch.export.export(Module(), (x,)).graph_module).graph_module
    clamps = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    assert [node.args[1:] for node in clamps] == [(0.0, None), (None, 1.0), (float("inf"),)]
    for found, expected in zip(graph_module(x), Module()(x), strict=True):
        assert torch.equal(found, expected)


def test_openvino_gets_no_norms_of_few_elements() -> None:
    """OpenVINO's kernel for RMS norms ends the process if fewer elements than a vector has are normalized."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, long: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                x.mean(-1, keepdim=True),
                x.mean((0, 1)),
                x.mean(-1),
                x[0, 0].mean(()),
                x[0, 1].mean(None),
                long.mean(-1),
            )

    inputs = torch.randn(2, 3, 8), torch.randn(2, 16)
    graph_module = short_means_to_sums(torch.export.export(Module(), inputs).graph_module).graph_module
    assert len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim)) == 1
    for found, expected in zip(graph_module(*inputs), Module()(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("divisor", [1, 3, -3, 16, 1000, 4096])
def test_remainders_without_the_operator(divisor: int) -> None:
    """Integers of both signs give what `torch.remainder` gives, in the whole range of 32 bits."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.remainder(x, divisor)

    x = torch.cat([torch.arange(-9000, 9000), torch.arange(10**6 - 5000, 10**6), torch.arange(2**31 - 5000, 2**31)])
    graph_module = remainders_to_divisions(torch.export.export(Module(), (x,)).graph_module).graph_module
    assert not any("remainder" in str(node.target) for node in graph_module.graph.nodes)
    assert torch.equal(graph_module(x)[0], torch.remainder(x, divisor))


def test_state_is_no_constant_of_a_partition() -> None:
    """ExecuTorch takes a buffer whose new value is computed in two steps for a constant."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(1, 4))
            self.register_buffer("table", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([self.state, x], dim=1)
            self.state.copy_(joined[:, 2:])
            return joined.sum() * self.table

    program = torch.export.export(Module(), (torch.ones(1, 2),)).run_decompositions({})
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}

    def left_outside(only_split: bool, last: str) -> list[str]:
        for node in program.graph.nodes:
            node.meta["delegation_tag"] = "tag0"
        next(iter(program.graph.output_node().all_input_nodes)).meta["delegation_tag"] = last
        keep_state_outside(program, only_split)
        return [name for name, node in placeholders.items() if "delegation_tag" not in node.meta]

    assert left_outside(only_split=False, last="tag0") == ["b_state"]
    assert left_outside(only_split=True, last="tag0") == []
    assert left_outside(only_split=True, last="tag1") == ["b_state"]


@pytest.mark.skipif("sys.platform == 'win32'", reason="processes end by signals on POSIX only")
def test_a_program_that_crashes_openvino_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method that was called last is named."""
    program = SimpleNamespace(
        cache=SimpleNamespace(max_length=64), methods=methods_by_name("decode", "prefill"), model=torch.nn.Identity()
    )
    monkeypatch.setattr(openvino, "_CHILD", "print('prefill', flush=True); import os; os.kill(os.getpid(), 11)")
    with pytest.raises(
        UnsupportedModelError, match="OpenVINO cannot run method 'prefill' of Identity: ends with SIGSEGV; export for"
    ):
        openvino.check_calls(Path("program.pte"), program.model, openvino.trial_of(program))
    child = "import sys, json; path, calls = json.load(sys.stdin); sys.exit(str((calls[0], calls[1], calls[-1])))"
    monkeypatch.setattr(openvino, "_CHILD", child)
    called = (
        r"\(\['prefill', \[\[\[1, 8\], 0, 'int64'\], \[\[1\], 0, 'int64'\]\]\], "
        r"\['prefill', \[\[\[1, 8\], 0, 'int64'\], \[\[1\], 8, 'int64'\]\]\], "
        r"\['decode', \[\[\[1, 1\], 0, 'int64'\], \[\[1\], 55, 'int64'\]\]\]\); export for"
    )
    with pytest.raises(UnsupportedModelError, match=called):
        openvino.check_calls(Path("program.pte"), program.model, openvino.trial_of(program))


def test_a_trial_has_an_id_for_each_codebook() -> None:
    """OpenVINO refuses ids without that dimension, and MusicGen would be refused with them."""
    methods = {"decode": ProgramMethod("decode", 1, 1).of_codebooks(4)}
    program = SimpleNamespace(cache=SimpleNamespace(max_length=2), methods=methods)
    assert openvino.trial_of(program) == [
        ("decode", [([1, 1, 4], 0, "int64"), ([1], position, "int64")]) for position in range(2)
    ]


def methods_by_name(*names: str) -> dict[str, ProgramMethod]:
    """Return methods of one token, and of 8."""
    lengths = {"decode": 1, "prefill": 8}
    return {name: ProgramMethod(name, lengths[name], lengths[name]) for name in names}
