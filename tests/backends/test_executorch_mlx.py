"""Programs for the delegate MLX: what is in the file, and its evaluation where the package `mlx` is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exportable_cache import export, load
from exportable_cache.backends.executorch.delegates import mlx_evaluator, table
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, MissingDependencyError, VerificationError
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.verification.verify import verify

from ..support.models import hybrid_model, tiny_model

pytest.importorskip("executorch", reason="the executorch extra is not installed")

HAS_MLX = importlib.util.find_spec("mlx") is not None
needs_mlx = pytest.mark.skipif(not HAS_MLX, reason="the mlx extra is not installed")
FAMILY = "gemma3_text"


def whole() -> PreTrainedModel:
    """Return a hybrid, or a ring with the fewest operators where MLX is not installed."""
    ring = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    return tiny_model(FAMILY) if HAS_MLX else hybrid_model(**ring)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a bundle that was not verified."""
    folder = tmp_path_factory.mktemp("mlx") / "bundle"
    return export(whole(), "executorch", 48, folder, delegate="mlx", prefill_chunk=8, verify=False)


def test_the_delegate_has_the_whole_method_and_its_state(bundle: Bundle) -> None:
    """The check of the lowering accepts one call and no state outside; the description says so."""
    assert list(bundle.manifest.program.methods) == ["forward"]
    assert bundle.manifest.files["program.pte"].holds.endswith("calls of MLXBackend: 1 in forward")
    assert bundle.manifest.verification is None


@pytest.mark.skipif("sys.platform == 'darwin'", reason="the wheel for Macs runs it")
def test_it_does_not_run_here(bundle: Bundle) -> None:
    """The error names the delegate."""
    with pytest.raises(
        BundleError, match="program.pte is for MLXBackend, which the ExecuTorch runtime of this machine"
    ):
        load(bundle.path)


def test_without_mlx_nothing_is_verified(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, and no report is made."""

    version = table.metadata.version

    def missing(name: str) -> str:
        if name == "mlx":
            raise table.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(table.metadata, "version", missing)
    monkeypatch.setattr("exportable_cache.common.compat.executorch.available_backends", set)
    with pytest.raises(MissingDependencyError, match=r"needs mlx<1,>=0.29, .*pip install 'exportable-cache\[mlx\]'"):
        verify(bundle, whole())


@needs_mlx
def test_a_hybrid_past_its_window_is_verified(bundle: Bundle) -> None:
    """The logits of the evaluated file are the model's, and the report says what was run."""
    report = verify(bundle, tiny_model(FAMILY))
    assert report.passed and report.max_difference < 1e-4
    assert report.remark == mlx_evaluator.REMARK


@needs_mlx
def test_a_wrong_graph_is_not_verified(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator's logits come from the graph: with another softmax they differ."""
    monkeypatch.setitem(mlx_evaluator.OPERATORS, "Softmax", lambda mx, node: mx.softmax(2 * node.x, axis=node.axis))
    monkeypatch.setitem(mlx_evaluator.OPERATORS, "Sdpa", lambda mx, node: 2 * node.q)
    assert not verify(bundle, tiny_model(FAMILY)).passed


@needs_mlx
def test_an_instruction_that_is_not_known_is_named(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is verified then."""
    monkeypatch.delitem(mlx_evaluator.OPERATORS, "Addmm")
    with pytest.raises(VerificationError, match="does not know the operator Addmm.*--no-verify"):
        verify(bundle, tiny_model(FAMILY))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Bundle]:
    """Return the preview and the bundle of a mixture with 4-bit weights, whose head is tied to a table in 8 bits."""
    folder = tmp_path_factory.mktemp("mlx") / "quantized"
    options = {"delegate": "mlx", "prefill_chunk": 8, "quantize": "4w", "verify": False}
    preview, bundle = (
        export(mixture(), "executorch", 48, folder, dry_run=dry_run, **options) for dry_run in (True, False)
    )
    return preview, bundle


def mixture() -> PreTrainedModel:
    """Return a mixture of one layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return tiny_model("mixtral", tie_word_embeddings=True, **sizes)


def test_quantized_weights_are_stored_once_in_few_bits(quantized: tuple[Any, Bundle]) -> None:
    """The preview says their bytes; the tied table is in the file once."""
    preview, bundle = quantized
    size = (bundle.path / "program.pte").stat().st_size
    assert preview.weights_bytes == bundle.manifest.weights_bytes < size < preview.weights_bytes + 40_000
    recorded = bundle.manifest.quantization
    assert (recorded.linear, recorded.embeddings, recorded.experts, recorded.largest_group) == ("4w", "8w", "4w", 128)
    table = quantize(mixture(), Quantization("4w", 32, "8w")).model.get_input_embeddings().weight.qdata
    rows = (table[:2].to(torch.int16) + 128).to(torch.uint8).numpy().tobytes()
    assert (bundle.path / "program.pte").read_bytes().count(rows) == 1


@needs_mlx
@pytest.mark.parametrize("changed", ["", "QuantizedMatmul", "GatherQmm", "Dequantize"])
def test_quantized_weights_are_evaluated(
    quantized: tuple[Any, Bundle], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of the model with the same weights; with weights 2 % larger they are not."""
    if changed:
        known = mlx_evaluator.OPERATORS[changed]
        monkeypatch.setitem(mlx_evaluator.OPERATORS, changed, lambda mx, node: known(mx, node) * 1.02)
    report = verify(quantized[1], mixture())
    assert report.passed is not bool(changed)
    assert changed or report.max_difference < 1e-4


@needs_mlx
@pytest.mark.parametrize(("index", "size"), [(7, 7), (-8, 7)])
def test_indices_out_of_range_are_refused(index: int, size: int) -> None:
    """MLX does not check them, and would read other memory."""
    import mlx.core

    with pytest.raises(ValueError, match=f"indices must be from -{size} to {size - 1}, got {index} to {index}"):
        mlx_evaluator._checked(mlx.core, mlx.core.array([index]), size)


@pytest.mark.parametrize(
    ("operator", "fields", "message"),
    [
        ("Slice", {"axis": 0, "start": 0, "stop": 3, "step": 0}, "step must be at least 1, got 0"),
        ("SliceUpdate", {"axis": 0, "start": 0, "stop": 3, "step": 0}, "step must be at least 1, got 0"),
        ("Conv1D", {"stride": 0, "dilation": 1, "groups": 1}, "stride must be at least 1, got 0"),
        ("Conv1D", {"stride": 1, "dilation": 1, "groups": 0}, "groups must be at least 1, got 0"),
        ("GatherMm", {"lhs_indices": mlx_evaluator.Tensor(1), "rhs_indices": None}, "indices must be from -2 to 1"),
        ("GatherMm", {"lhs_indices": None, "rhs_indices": mlx_evaluator.Tensor(1)}, "indices must be from -2 to 1"),
        ("Tile", {"reps": [2**30, 8]}, "does not allocate"),
        ("Repeat", {"repeats": 2**30, "axis": 0}, "does not allocate"),
        ("BroadcastTo", {"shape": [2**30, -1, -1, -1]}, "does not allocate"),
        ("ARange", {"start": 0, "stop": 2**31 - 1, "step": 1, "scalar_type": 4}, "does not allocate"),
        ("AsStrided", {"shape": [2**31 - 1], "strides": [0], "offset": 0}, "does not allocate"),
    ],
)
def test_operands_that_would_end_the_process_are_refused(operator: str, fields: dict, message: str) -> None:
    """MLX would divide by zero, read other memory, or allocate without limit. Tensors are torch's here."""
    graph = object.__new__(mlx_evaluator.Graph)
    graph.tensors = {0: torch.zeros(2, 3, 3), 1: torch.tensor([10**6]), 2: SimpleNamespace(shape=(2, 3, 3), size=18)}
    x = mlx_evaluator.Tensor(2 if operator == "AsStrided" else 0)
    node = mlx_evaluator.Node(operator, {**dict.fromkeys(("x", "dst", "update", "w", "a", "b"), x), **fields}, graph)
    with pytest.raises(ValueError, match=message):
        mlx_evaluator.OPERATORS[operator](torch, node)


def test_a_main_chain_that_is_not_there_is_a_damaged_file() -> None:
    """The error names the file."""
    graph = object.__new__(mlx_evaluator.Graph)
    graph.inputs, graph.outputs, graph.chains, graph.main = [], [], [], 99
    evaluator = object.__new__(mlx_evaluator.MLXEvaluator)
    evaluator._name, evaluator._calls, evaluator._graphs = "program.pte", {"forward": []}, {"forward": graph}
    with pytest.raises(BundleError, match="program.pte cannot be read: .*; export the model again"):
        evaluator.run("forward")


def test_a_method_in_pieces_is_not_verified() -> None:
    """Only a program that is one call is evaluated."""
    plan = SimpleNamespace(name="forward", delegates=[1, 2], chains=[SimpleNamespace(instructions=[1, 2, 3])])
    with pytest.raises(VerificationError, match="'forward' has 3 instructions and 2 calls.*--no-verify"):
        mlx_evaluator.only_call(plan)


def test_the_reversal_after_a_choice_of_experts_is_computed() -> None:
    """The delegate lowers `topk` to an ascending sort, and a slice from the last value down."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    node = SimpleNamespace(x=mx.array([[1.0, 2.0, 3.0]]), axis=-1, start=2, stop=-4, step=-1)
    assert mlx_evaluator.OPERATORS["Slice"](mx, node).tolist() == [[3.0, 2.0, 1.0]]
