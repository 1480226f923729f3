"""`export --dry-run`: what it says is what an export then writes, and it needs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from exportable_cache import export
from exportable_cache.cli.app import app
from exportable_cache.errors import BundleError, InputError, UnsupportedModelError
from exportable_cache.models.loading.without_weights import model_without_weights
from exportable_cache.models.lora import add_slots
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.sizes import quantized_bytes
from exportable_cache.models.quantization.spec import Quantization

from .decoding.byte_tokenizer import SIZE, byte_tokenizer
from .support import checkpoints
from .support.models import tiny_model

CAPACITY = 48


pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A folder in bfloat16 with its weights taken away: whoever reads them fails."""
    tiny_model("gemma2", dtype=torch.bfloat16, vocab_size=SIZE).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "weights")
    return tmp_path / "model"


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"kv_dtype": "int8", "batch_size": 2}])
def test_what_it_says_is_what_is_written(config_only: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    found = export(config_only, "fake", CAPACITY, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    (tmp_path / "weights").rename(config_only / "model.safetensors")
    manifest = export(config_only, "fake", CAPACITY, tmp_path / "out", **options).manifest
    assert (found.weights_bytes, found.cache_bytes) == (manifest.weights_bytes, manifest.cache_bytes)
    assert (found.dtype, found.architecture, found.target) == (manifest.dtype, manifest.architecture, manifest.target)
    assert found.least_memory_bytes == found.weights_bytes + found.cache_bytes
    assert ("tokenizer/" in found.files) and {"config.json", "generation_config.json"} < set(found.files)
    assert (found.remarks == ()) is (manifest.dtype == manifest.stored_dtype)


#: Rows of 8-bit weights whose scale is stored for each 32 of them.
GROUPED = ("8w", None, "8w", None, None, None, 32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [("8da4w", 32, "8w"), ("8da4w", 64, None), ("8da8w", None, "8w"), ("8w", None, None), (None, 32, "4w"), GROUPED],
)
def test_bytes_of_quantised_weights_are_foreseen(scheme: tuple[Any, ...], tied: bool) -> None:
    pytest.importorskip("torchao")
    if tied and scheme[2] == "4w":
        pytest.skip("refused: one copy cannot serve both")
    model, quantization = checkpoints.wide_model(tie_word_embeddings=tied), Quantization(*scheme)
    bare = model_without_weights(model.config)
    assert bare.device.type == "meta"
    assert quantized_bytes(bare, quantization) == quantize(model, quantization).weights_bytes


def test_the_table_stays_as_it_is_where_that_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model = checkpoints.wide_model()
    for given, embeddings in (({}, "8w"), ({"quantize_embeddings": "none"}, None)):
        found = export(model, "pt2", CAPACITY, tmp_path / "out", quantize="8w", dry_run=True, **given)
        assert found.weights_bytes == quantized_bytes(model, Quantization("8w", None, embeddings))


def test_it_refuses_what_the_export_would(config_only: Path, tmp_path: Path) -> None:
    def dry(**options: Any) -> Any:
        given = {"model_or_path": config_only, "target": "fake", "output_dir": tmp_path / "out", **options}
        return export(**given, dry_run=True)

    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="exists and is not a folder"):
        dry(output_dir=tmp_path / "file")
    with pytest.raises(InputError, match="unknown target"):
        dry(target="abacus")
    with pytest.raises(InputError, match="must divide the rows"):
        dry(target="executorch", quantize="8da4w", group_size=64)
    tiny_model("gpt2", max_position_embeddings=32).config.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match="at most 32"):
        dry(model_or_path=tmp_path / "gpt2", max_cache_len=64)
    given = {"model_or_path": tmp_path / "gpt2"}
    assert dry(**given).cache_bytes == dry(**given, max_cache_len=32).cache_bytes
    assert dry(**given).max_cache_len == 32
    # Delegates other than XNNPACK have no recipes to choose from.
    for delegate, has_some in (("xnnpack", True), ("vulkan", False)):
        assert bool(dry(target="executorch", delegate=delegate, prefill_chunk=1).recipes) is has_some
    checkpoints.edit_config(config_only, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="gptq"):
        dry()


def test_it_counts_the_slots_of_adapters(config_only: Path, tmp_path: Path) -> None:
    plain = export(config_only, "pt2", CAPACITY, tmp_path / "out", dry_run=True)
    options: dict[str, Any] = {"lora_slots": 2, "lora_rank": 4, "lora_targets": ["q_proj"]}
    found = export(config_only, "pt2", CAPACITY, tmp_path / "out", dry_run=True, **options)
    model = tiny_model("gemma2", dtype=torch.bfloat16, vocab_size=SIZE)
    expected = add_slots(model, 2, 4, ["q_proj"]).nbytes
    assert found.least_memory_bytes - plain.least_memory_bytes == expected > 0
    assert found.weights_bytes == plain.weights_bytes
    assert f"2 slots for adapters would take {expected:,} bytes of memory" in found.remarks
    with pytest.raises(InputError, match="lora_targets must be linear layers of the decoder, got 'x'"):
        export(config_only, "pt2", CAPACITY, tmp_path / "out", dry_run=True, lora_slots=1, lora_targets=["x"])


def test_a_float_checkpoint_has_no_integers_to_keep(config_only: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(InputError, match="quantize='keep' needs a checkpoint whose linear layers are integers"):
        export(config_only, "executorch", CAPACITY, tmp_path / "out", dry_run=True, quantize="keep")


def test_the_command_says_it_in_lines_or_in_json(config_only: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    asked = ["export", str(config_only), "-n", "48", "-o", str(tmp_path / "out"), "--dry-run"]
    asked += ["-O", "kernels=executorch"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.stderr
    assert "would hold Gemma2ForCausalLM with its cache, for executorch" in result.stdout
    assert "the duration is unknown" in result.stdout
    assert "weights are stored in bfloat16; exported in float32, which executorch computes best" in result.stdout
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["weights_bytes"] == 4 * sum(p.numel() for p in tiny_model("gemma2", vocab_size=SIZE).parameters())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_says_what_is_known_of_float16_on_a_gpu(config_only: Path, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")
    found = export(config_only, "tensorrt", CAPACITY, tmp_path / "out", dry_run=True, dtype=dtype)
    assert any("float16 was outside the tolerance" in remark for remark in found.remarks) is (dtype == "float16")
