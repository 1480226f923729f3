"""The `.pte`: what its graph does, what its file holds, and how long it runs."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from exportable_cache import ExportableCache, export, load
from exportable_cache.backends import backend_for
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.common.native.kernels import VARIABLE
from exportable_cache.errors import BundleError, InputError, MissingDependencyError, UnsupportedModelError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.memory import resident_kib
from ..support.models import WINDOW, tiny_model, tokens
from ..support.oracle import reference_logits
from ..support.sessions import describe, folded_bundle, lowered_session, split_bundle

pytest.importorskip("executorch", reason="the executorch extra is not installed")

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.runtime import Runtime

from exportable_cache.backends.executorch.lowering.lower import to_edge, to_program
from exportable_cache.backends.executorch.pte.kernels import check_kernels

CAPACITY = 96


@pytest.fixture(scope="module")
def lowered():
    """A hybrid, lowered: a cache like its own, and what its file calls."""
    model, folder = split_bundle()
    written = deserialize_pte_binary((folder / "program.pte").read_bytes())
    return ExportableCache.from_model(model, CAPACITY), SimpleNamespace(executorch_program=written.program)


def instructions(result, method: str):
    """(operator name, argument shapes) of each kernel call in a method of an ExecuTorch program."""
    plan = next(plan for plan in result.executorch_program.execution_plan if plan.name == method)
    for chain in plan.chains:
        for instruction in chain.instructions:
            call = instruction.instr_args
            if hasattr(call, "op_index"):
                shapes = [list(getattr(plan.values[index].val, "sizes", [])) for index in call.args]
                yield plan.operators[call.op_index].name, shapes


def test_decode_writes_in_place_and_copies_no_cache(lowered) -> None:
    _, result = lowered
    calls = list(instructions(result, "decode"))
    counts = Counter(name for name, _ in calls)
    assert counts["aten::index_put_"] == 4  # keys and values of two layers
    assert (
        not {"aten::copy_", "aten::index_put", "aten::clone", "aten::expand_copy", "aten::permute_copy"} & counts.keys()
    )
    sizes = ([1, 2, CAPACITY, 8], [1, 2, WINDOW, 8], [2, CAPACITY, 8], [2, WINDOW, 8])
    touching = {name for name, shapes in calls if any(shape in sizes for shape in shapes)}
    assert touching == {"aten::index_put_"}


def test_prefill_writes_full_layers_in_place_and_replaces_rings_once(lowered) -> None:
    _, result = lowered
    calls = list(instructions(result, "prefill"))
    counts = Counter(name for name, _ in calls)
    assert counts["aten::index_put_"] == 2 and counts["aten::copy_"] == 2
    copied = [shapes[0] for name, shapes in calls if name == "aten::copy_"]
    assert copied == [[1, 2, WINDOW, 8]] * 2


def test_both_methods_plan_one_cache(lowered) -> None:
    cache, result = lowered
    plans = {plan.name: plan.non_const_buffer_sizes for plan in result.executorch_program.execution_plan}
    # The last arena holds the mutable buffers: the same bytes in every method, at the same place.
    cache_bytes = sum(t.nbytes for name, t in cache.named_state() if not name.endswith("cumulative_length"))
    assert {sizes[-1] for sizes in plans.values()} == {cache_bytes}


def test_the_file_holds_the_weights_once() -> None:
    model, folder = split_bundle()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights < (folder / "program.pte").stat().st_size < 1.25 * weights


def test_a_method_loaded_late_sees_the_cache() -> None:
    model, folder = split_bundle()
    ids = tokens(40)
    expected = reference_logits(model, ids, 9)[0]
    loaded = Runtime.get().load_program(folder / "program.pte")
    prefill = loaded.load_method("prefill")
    assert (prefill.execute([ids[:, :9].contiguous(), torch.tensor([0])])[0] - expected[0]).abs().max() <= 1e-4
    decode = loaded.load_method("decode")
    # Past the window of 8, several times.
    for position in range(9, 40):
        logits = decode.execute([ids[:, position : position + 1].contiguous(), torch.tensor([position])])[0]
        assert (logits - expected[position - 8]).abs().max() <= 1e-4


def test_batches_are_refused_of_other_delegates(tmp_path) -> None:
    with pytest.raises(
        InputError, match="batch_size must be at most 1 for target 'executorch', got 2.*delegate='xnnpack'"
    ):
        export(tiny_model("llama"), "executorch", 64, tmp_path / "out", batch_size=2, delegate="vulkan")
    assert not list(tmp_path.iterdir())


# Past the window in the fast lane: the method that is loaded late, above.
@pytest.mark.full
@torch.no_grad()
def test_ten_thousand_steps_of_a_sliding_model_in_constant_memory() -> None:
    model = tiny_model("mistral")
    session = lowered_session(model, "executorch")
    steps = 10_000
    ids = tokens(steps)
    session.prefill(ids[:, :2])
    resident = []
    for position in range(2, steps):
        logits = session.decode(ids[:, position])
        if position in (1_000, 5_500, steps - 1):
            resident.append(resident_kib())
    assert session.length.tolist() == [steps]
    # Two layers of window 8 reach back 14 tokens: the last 40 decide the last logits.
    tail = ids[:, -40:]
    expected = model(tail, position_ids=torch.arange(steps - 40, steps)[None]).logits[:, -1]
    assert (logits - expected).abs().max() <= 1e-4
    # What other tests left behind may be allocated once; a step that kept even its logits would add 512 bytes,
    # 2,250 KiB in either half.
    assert min(resident[1] - resident[0], resident[2] - resident[1]) < 1024


def test_a_state_is_saved_and_loaded_by_the_stock_runtime(tmp_path):
    """Check that the names of the buffers in the file give out the cache of full layers and rings, of all methods."""
    model, folder = split_bundle()
    session, ids = load(folder), tokens(40)
    session.prefill(ids[:, :20])
    session.save_state(tmp_path / "state")
    expected = [session.decode(ids[:, index]) for index in range(20, 24)]
    session.reset()
    session.prefill(ids[:, 7:30])
    session.load_state(tmp_path / "state")
    assert session.length.tolist() == [20]
    for index, logits in enumerate(expected, 20):
        assert torch.equal(session.decode(ids[:, index]), logits)
    with pytest.raises(InputError, match="the 'executorch' runtime does not give out its cache row by row"):
        session.fork()
    session.runner._methods = {}
    with pytest.raises(InputError, match="the program must give out layers.0.keys to save or load its state"):
        session.save_state(tmp_path / "other")


def test_a_damaged_file_is_refused(tmp_path) -> None:
    model = tiny_model("mistral", num_hidden_layers=1)
    backend = backend_for("executorch")
    program = Program(
        model, ExportableCache.from_model(model, 32), backend.program_spec(ProgramSpec(1), backend.options())
    )
    path = tmp_path / "program.pte"
    path.write_bytes(b"\0" * 100_000)
    with pytest.raises(BundleError, match="cannot load program.pte"):
        backend.open(tmp_path, describe(program))
    path.unlink()
    with pytest.raises(BundleError, match="cannot load program.pte"):
        backend.open(tmp_path, describe(program))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            b"exportable_cache::x",
            "no kernel for exportable_cache::x.out; .* for the native operators .* build; .* --recipe portable",
        ),
        (b"another::operator_x", "no kernel for another::operator_x.out; install the release of executorch"),
    ],
)
def test_an_operator_that_the_runtime_lacks_is_named(
    name: bytes, message: str, tmp_path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    bundle = Bundle.open(folded_bundle(llm_runner=True)[1])
    content = (bundle.path / "program.pte").read_bytes()
    assert b"llama::update_cache\0" in content
    (tmp_path / "program.pte").write_bytes(content.replace(b"llama::update_cache\0", name + b"\0"))
    with pytest.raises(BundleError, match=message):
        backend_for("executorch").open(tmp_path, bundle.manifest.description())
    # ExecuTorch itself logs a page for each.
    assert "operator_registry.cpp" not in "".join(capfd.readouterr())


def test_unknown_options_are_refused() -> None:
    known = "delegate, compute, form, kernels, keys, linears, llm_runner, methods, score_length"
    with pytest.raises(InputError, match=f"no option 'quantize'; it knows {known}"):
        backend_for("executorch").options.parse({"quantize": True})


class Call(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def on_the_runtime(function, x: torch.Tensor, partitioner=None) -> torch.Tensor:
    edge = to_edge_transform_and_lower(
        torch.export.export(Call(function), (x,)),
        partitioner=partitioner,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return Runtime.get().load_program(edge.to_executorch().buffer).load_method("forward").execute([x])[0]


@pytest.mark.canary
def test_xnnpack_still_needs_tanh_gelu_spelled_out() -> None:
    """Fails once the delegate honours `approximate`: then backends/executorch/lowering/rewrites.py can go."""
    x = torch.linspace(-4, 4, 513)
    gap = on_the_runtime(lambda t: F.gelu(t, approximate="tanh"), x, [XnnpackPartitioner()]) - F.gelu(
        x, approximate="tanh"
    )
    assert gap.abs().max() > 1e-4


@pytest.mark.canary
def test_integer_remainder_still_takes_the_sign_of_the_dividend() -> None:
    """Fails once it does not: then rings need not keep the dividend positive."""
    x = torch.arange(-9, 9)
    assert on_the_runtime(lambda t: torch.remainder(t, 8), x)[0].item() == -1


@torch.no_grad()
def test_a_convolution_takes_the_longest_input_of_its_range() -> None:
    """torch chooses another kernel for it from 20480 values on, 320 here; the export saw 32."""
    longest = torch.randn(1, 64, 400)
    length = torch.export.Dim("length", min=16, max=400)
    module = nn.Conv1d(64, 8, kernel_size=3).eval()
    exported = torch.export.export(module, (longest[:, :, :32].clone(),), dynamic_shapes=({2: length},))
    program = Runtime.get().load_program(bytes(to_program(to_edge({"forward": exported})).buffer))
    (output,) = program.load_method("forward").execute([longest])
    assert (output - module(longest)).abs().max() <= 1e-4


def test_an_operator_without_a_kernel_is_refused_by_name(lowered) -> None:
    check_kernels(lowered[1])
    program = torch.export.export(Call(lambda t: torch.sort(t).values), (torch.randn(4),))
    with pytest.raises(UnsupportedModelError, match="no kernel for aten::sort.values; export for target 'pt2'"):
        check_kernels(to_program(to_edge({"forward": program})))


def test_older_compiled_kernels_are_named_as_the_reason(monkeypatch) -> None:
    """They lack operators that programs of this release call."""
    monkeypatch.setattr("exportable_cache.backends.executorch.pte.kernels.operator_names", set)
    program = torch.export.export(Call(lambda t: torch.ops.exportable_cache.to_float16(t)), (torch.randn(4),))
    lowered = to_program(to_edge({"forward": program}))
    with pytest.raises(MissingDependencyError, match="lack exportable_cache::to_float16.out; build them again with"):
        check_kernels(lowered)


def test_what_cannot_be_lowered_is_refused_by_a_sentence(monkeypatch, tmp_path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    backend = backend_for("executorch")
    program = Program(
        model, ExportableCache.from_model(model, 16), backend.program_spec(ProgramSpec(8), backend.options())
    )

    def failing(*arguments):
        raise RuntimeError("reshape only supports 1 dynamic dimension\nmore")

    monkeypatch.setattr("exportable_cache.backends.executorch.lowering.lower.lower_programs", failing)
    with pytest.raises(
        UnsupportedModelError,
        match=r"LlamaForCausalLM cannot be lowered .*\(RuntimeError: reshape only supports 1 dynamic dimension\)",
    ):
        backend.lower(program, tmp_path, backend.options())
    assert not list(tmp_path.iterdir())
