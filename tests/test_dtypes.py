"""Which dtype is exported: the rule, the one line, the refusals, and bfloat16 checkpoints of well-known families."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from exportable_cache import export, load
from exportable_cache.backends import TARGETS
from exportable_cache.backends.base import target_dtypes
from exportable_cache.bundle.manifest import Manifest
from exportable_cache.cache.spec import CacheSpec
from exportable_cache.errors import InputError
from exportable_cache.models.loading.without_weights import model_without_weights
from exportable_cache.models.quantization.sizes import exact_bytes, float_bytes
from exportable_cache.pipeline.dtypes import choose_dtype
from exportable_cache.pipeline.spec import ExportSpec
from exportable_cache.pipeline.steps import load as load_step
from exportable_cache.pipeline.steps import quantise, resolve
from exportable_cache.verification.report import VerifyReport

from .support import fake_target
from .support.kinds import KINDS
from .support.models import among, tiny_model, tokens
from .support.oracle import difference, reference_logits
from .zoo.architectures import architectures
from .zoo.build import tiny_model as zoo_model

CAPACITY = 64
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("delegate", ["xnnpack", "vulkan", "coreml"])
def test_executorch_exports_half_precision_in_float32(stored: torch.dtype, delegate: str) -> None:
    assert choose_dtype(stored, None, "executorch", {"delegate": delegate}).chosen == torch.float32


@pytest.mark.parametrize("stored", [*HALVES, torch.float32])
def test_other_targets_keep_the_stored_dtype_unless_weights_are_quantised(stored: torch.dtype) -> None:
    for target, options in (("pt2", {}), ("aoti", {}), ("tensorrt", {}), ("executorch", {"delegate": "tensorrt"})):
        assert choose_dtype(stored, None, target, options).chosen == stored
        # Kernels of torch and XNNPACK compute in float32; TensorRT dequantises weights to the dtype of the program.
        quantised = stored if "tensorrt" in (target, *options.values()) else torch.float32
        assert choose_dtype(stored, None, target, options, quantized=True).chosen == quantised
        assert choose_dtype(stored, torch.float16, target, options).chosen == torch.float16


@pytest.mark.parametrize("stored", HALVES)
def test_own_linear_layers_keep_weights_as_they_are_stored(stored: torch.dtype) -> None:
    def choice(*given: Any, quantized: bool = False, **options: str) -> Any:
        return choose_dtype(stored, given[0] if given else None, "executorch", options, quantized)

    name = str(stored).removeprefix("torch.")
    kept = f"weights are stored and kept in {name}; products are in float32, which executorch computes best"
    assert str(choice(kernels="native")) == str(choice(linears="native")) == kept
    assert str(choice(torch.float32, kernels="native")).endswith("products are in float32, as requested")
    others = [choice(), choice(kernels="native", linears="delegate"), choice(kernels="native", quantized=True)]
    others += [
        choice(torch.float16, kernels="native"),
        choose_dtype(torch.float32, None, "executorch", {"kernels": "native"}),
    ]
    assert not any(other.kept for other in others)


def test_inputs_are_rounded_to_the_dtype_of_the_weights() -> None:
    rounded = {"kernels": "native", "compute": "bfloat16"}
    choice = choose_dtype(torch.bfloat16, None, "executorch", rounded)
    assert choice.chosen == torch.float32 and choice.kept and choice.rounded
    kept = "weights are stored and kept in bfloat16; products are of bfloat16 and sums in float32, as requested"
    assert str(choice) == kept == str(choose_dtype(torch.bfloat16, torch.float32, "executorch", rounded))
    assert target_dtypes("executorch", rounded).rounded == torch.bfloat16
    assert target_dtypes("executorch", {"kernels": "native"}).rounded is None


@pytest.mark.parametrize(
    ("stored", "requested", "quantized", "message"),
    [
        (torch.float32, None, False, "for weights stored in float32, got 'bfloat16'; leave out compute"),
        (torch.float16, None, False, "for weights stored in float16, got 'bfloat16'; leave out compute"),
        (torch.bfloat16, torch.float16, False, "with dtype='float16', got 'bfloat16'"),
        (torch.bfloat16, None, True, "with quantize, got 'bfloat16', because it is for weights that are kept in"),
    ],
)
def test_inputs_are_rounded_for_weights_in_bfloat16_only(
    stored: torch.dtype, requested: torch.dtype | None, quantized: bool, message: str
) -> None:
    rounded = {"linears": "native", "compute": "bfloat16"}
    with pytest.raises(InputError, match=f"^compute must be 'float32' {message}"):
        choose_dtype(stored, requested, "executorch", rounded, quantized)


@pytest.mark.parametrize("others", [{"kernels": "executorch"}, {"kernels": "native", "linears": "delegate"}])
def test_inputs_are_rounded_by_native_layers_only(others: dict[str, str], tmp_path: Path) -> None:
    message = (
        "^compute must be 'float32' without native linear layers, got 'bfloat16'; pass kernels='native' or linears="
    )
    with pytest.raises(InputError, match=message):
        export("demo", "executorch", 64, tmp_path / "bundle", compute="bfloat16", **others)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", HALVES)
def test_bytes_of_weights_that_are_kept_are_those_of_layers_and_tables(stored: torch.dtype, tied: bool) -> None:
    model = tiny_model("llama", stored, tie_word_embeddings=tied).float()
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    norms = sum(one.numel() for one in model.parameters() if one.dim() == 1)
    bare = model_without_weights(model.config).to(torch.float32)
    assert exact_bytes(model) == float_bytes(bare, torch.float32, stored) == 2 * matrices + 4 * norms
    model.lm_head.weight.data[0, 0] = 1 + 2**-20
    assert exact_bytes(model) == 2 * (matrices + model.lm_head.weight.numel()) + 4 * norms


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "bfloat16"},
            "dtype must not be 'bfloat16' for target 'executorch', because XNNPACK .*leave dtype out",
        ),
        ({"dtype": "float16", "quantize": "8da4w"}, "dtype must be float32 with quantize, got 'float16'; leave dtype"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_model_is_looked_at(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("executorch")
    with pytest.raises(InputError, match=message):
        export(str(tmp_path / "no-such-model"), "executorch", CAPACITY, tmp_path / "out", **options)


def test_a_live_model_stays_as_it_is_and_the_distance_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    model = tiny_model("gemma3_text", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lines: list[str] = []
    bundle = export(
        model, "fake", CAPACITY, tmp_path / "out", dtype="float32", progress=lambda line, *_: lines.append(line)
    )
    assert lines.count("weights are stored in bfloat16; exported in float32, as requested") == 1
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    manifest = Manifest.read(bundle.path)
    assert (manifest.dtype, manifest.stored_dtype) == ("float32", "bfloat16")
    report = VerifyReport(**manifest.verification)
    # Rounding to bfloat16 at every operator, of logits near 3, against rounding to float32.
    assert report.max_difference <= 1e-4 < 1e-3 < report.stored.max_difference < 0.5
    assert report.stored.dtype == "bfloat16" and "as stored in bfloat16" in str(report)


def test_nothing_is_measured_where_the_stored_dtype_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    manifest = export(tiny_model("llama"), "fake", CAPACITY, tmp_path / "out").manifest
    assert manifest.stored_dtype == "float32" and manifest.verification["stored"] is None


@pytest.mark.parametrize(
    ("name", "given", "bias"),
    [
        ("deepseek_v3", "folder", "e_score_correction_bias"),
        ("deepseek_v3", "object", "e_score_correction_bias"),
        # Its class creates the biases in float32, and does not name them.
        ("lfm2_moe", "folder", "expert_bias"),
    ],
)
def test_a_16_bit_export_rounds_what_transformers_rounds(name: str, given: str, bias: str, tmp_path: Path) -> None:
    """Frequencies of RoPE and biases of routers stay in float32, as `from_pretrained` loads them."""
    row = next(row for row in architectures() if row.name == f"causal-{name}")
    model = zoo_model(row)
    model.save_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    source: Any = model
    if given == "folder":
        source = tmp_path / "half"
        expected.save_pretrained(source)
    spec = ExportSpec(source, "pt2", tmp_path / "x", cache=CacheSpec(CAPACITY), dtype=torch.bfloat16)
    resolved = resolve(spec)
    exported = quantise(resolved, load_step(resolved)).model
    for one in (expected, exported):
        one.set_attn_implementation("eager")
    ids = tokens(CAPACITY)
    assert dtypes_of(exported) == dtypes_of(expected)
    assert torch.equal(exported(ids).logits, expected(ids).logits)
    kept = {name.rsplit(".", 1)[-1] for name, dtype in dtypes_of(exported).items() if dtype == torch.float32}
    # Later releases also keep the weights of the router.
    assert kept >= {"inv_freq", "original_inv_freq", bias}


def dtypes_of(model: PreTrainedModel) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_quantisation_starts_from_bfloat16(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    bundle = export(tmp_path / "model", "pt2", CAPACITY, tmp_path / "out", quantize="8w", prefill_chunk=8)
    assert (bundle.manifest.dtype, bundle.manifest.stored_dtype) == ("float32", "bfloat16")
    assert bundle.manifest.verification["passed"]


#: Of the families whose checkpoints hubs hold most of; those of experts, latent attention and states among them.
WELL_KNOWN = (
    "llama qwen3 gemma3_text mistral phi3 gemma2 gpt2 qwen2 olmo3 cohere2 gpt_oss mixtral qwen3_moe granite smollm3 "
    "starcoder2 gpt_neox phi glm4 exaone4 ernie4_5 olmo2 stablelm opt bloom deepseek_v3 lfm2 mamba2 falcon_h1 "
    "gemma3n_text"
).split()


# In the fast lane: one with native operators, to the bit, in test_recipes.py.
@pytest.mark.parametrize("family", among(WELL_KNOWN, []))
def test_bfloat16_checkpoints_export_with_no_option(family: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    model = tiny_model(family, dtype=torch.bfloat16, **KINDS.get(family, ({}, []))[0])
    model.save_pretrained(tmp_path / "model")
    bundle = export(tmp_path / "model", max_cache_len=CAPACITY, output_dir=tmp_path / "out")
    assert (bundle.manifest.dtype, bundle.manifest.stored_dtype) == ("float32", "bfloat16")
    session, ids = load(bundle.path), tokens(30)
    exact = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32).eval()

    def step(piece: torch.Tensor) -> torch.Tensor:
        return session.decode(piece[:, 0]) if piece.shape[1] == 1 else session.prefill(piece)

    assert difference(step, reference_logits(exact, ids, 12), ids, 12) <= 1e-4


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-m", "exportable_cache", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.startswith("exportable-cache ")
