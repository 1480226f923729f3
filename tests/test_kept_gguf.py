"""Integers of GGUF files that a program stores unchanged (`quantize="keep"`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from exportable_cache import export, load
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.loading.gguf_blocks import TYPES, integers_of_blocks
from exportable_cache.models.loading.loading import load_model, load_to_quantise
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization

from .support import checkpoints
from .support.models import tokens

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("torchao", reason="the executorch extra is not installed")

#: Rows that blocks of k-quants divide.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_read_as_ggml_computes_them(kind: str) -> None:
    """Compare each type with gguf's own arithmetic, bit by bit, and its integers and zero points with that weight."""
    of_kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(1).normal(size=(48, 512)).astype(np.float32)
    blocks = checkpoints.blocks(values, of_kind)
    found, weight = integers_of_blocks("layer", kind, torch.from_numpy(blocks))
    assert torch.equal(weight, torch.from_numpy(gguf.quants.dequantize(blocks, of_kind)))
    assert int(found.integers.min()) >= -(2 ** (found.bits - 1)) and int(found.integers.max()) < 2 ** (found.bits - 1)
    again = found.dequantize(torch.float32)
    assert (again - weight).abs().max() <= 4e-7 * weight.abs().max() and weight.std() > 0


@torch.no_grad()
def test_layers_of_a_file_are_kept_in_the_order_of_the_models_rows(tmp_path: Path) -> None:
    """Keep a file of all types, whose queries and keys have their rows in another order than the model's."""
    checkpoints.write_gguf(
        tmp_path / "tiny.gguf", kinds_of_weights=[*TYPES, "TQ1_0"], **{**SIZES, "num_hidden_layers": 2}
    )
    loaded = load_to_quantise(tmp_path / "tiny.gguf", keep=True)
    assert loaded.remarks == ("dequantised tensors of tiny.gguf: 1 in TQ1_0, such as blk.1.ffn_up.weight",)
    made = quantize(loaded.model, Quantization("keep", kept="native"), stored=loaded.integers)
    assert len(made.kept) == 13 and made.remark == ""
    ids = tokens(9)
    assert (made.model(ids).logits - load_model(tmp_path / "tiny.gguf").model(ids).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "alone"])
@pytest.mark.parametrize(("kind", "form", "kept"), [
    ("Q6_K", "native", (True, True)), ("Q4_K", "native", (True, False)), ("Q5_K", "native", (True, False)),
    ("Q4_0", "native", (True, False)), ("Q6_K", "affine", (True, True)), ("Q4_K", "affine", (False, False)),
])  # fmt: skip
@torch.no_grad()
def test_a_table_is_kept_with_the_head_that_is_tied_to_it(
    kind: str, form: str, kept: tuple[bool, bool], tied: bool, tmp_path: Path
) -> None:
    """Keep a table, also with zero points or 4 bits if native operators read the blocks of its head."""
    file, is_kept = tmp_path / "tiny.gguf", kept[not tied]
    checkpoints.write_gguf(file, kind_of_table=kind, **SIZES, tie_word_embeddings=tied)
    loaded = load_to_quantise(file, keep=True)
    made = quantize(loaded.model, Quantization("keep", kept=form), stored=loaded.integers)
    table, head = made.model.get_input_embeddings(), made.model.lm_head
    assert ("model.embed_tokens.weight" in made.kept) == is_kept == ("model.embed_tokens" not in made.remark)
    if is_kept and tied:
        assert table.weight.qdata.data_ptr() == head.weight.qdata.data_ptr()
    ids = tokens(9)
    assert (made.model(ids).logits - load_model(file).model(ids).logits).abs().max() <= 1e-5


@pytest.mark.full
def test_a_pt2_program_keeps_the_blocks(tmp_path: Path) -> None:
    """Export a file with minimums, groups of 16 and 8 bits, and compare with the dequantised model."""
    kinds = ["Q4_K", "Q6_K", "Q4_0", "Q5_K", "Q8_0", "Q2_K", "Q4_1"]
    checkpoints.write_gguf(
        tmp_path / "tiny.gguf", kinds_of_weights=kinds, kind_of_table="Q6_K", **SIZES, tie_word_embeddings=True
    )
    bundle = export(tmp_path / "tiny.gguf", "pt2", 48, tmp_path / "out", quantize="keep")
    assert bundle.manifest.remarks == []
    assert bundle.manifest.quantization.max_difference <= 1e-5
    with load(bundle.path) as session, torch.no_grad():
        expected = load_model(tmp_path / "tiny.gguf").model(tokens(9)).logits[:, -1]
        assert (session.prefill(tokens(9)) - expected).abs().max() <= 1e-5


#: Types that are read as floats only.
OTHERS = ("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def test_other_types_are_read_as_floats_and_not_kept(tmp_path: Path) -> None:
    """Compare each weight with gguf's arithmetic, and check that `keep` names the types."""
    file = tmp_path / "tiny.gguf"
    checkpoints.write_gguf(file, kinds_of_weights=OTHERS, **{**SIZES, "num_hidden_layers": 2})
    weights = load_model(file).model.state_dict()
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        kind = tensor.tensor_type.name
        if kind in OTHERS and "ffn" in tensor.name:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.mlp.{part.removeprefix('ffn_')}_proj.weight"
            expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(weights[name], expected) and 0 < expected.std() < 1, kind
        if kind in OTHERS:
            found[kind] = tensor.name
    assert {*found} == {*OTHERS}
    with pytest.raises(InputError, match="quantize='keep' needs a checkpoint.*got none .dequantised tensors") as caught:
        export(file, "pt2", 48, tmp_path / "out", quantize="keep")
    assert all(f" in {kind}, such as blk." in str(caught.value) for kind in OTHERS)
    assert str(caught.value).endswith("); leave it out, which dequantises them, or use another scheme")


def test_types_that_gguf_cannot_read_are_named(tmp_path: Path) -> None:
    """Check the message for a type without arithmetic in gguf, and for a file that ends early."""
    file = tmp_path / "tiny.gguf"
    checkpoints.write_gguf(file, kinds_of_weights=["Q1_0"], **SIZES)
    with pytest.raises(
        UnsupportedModelError, match=r"cannot read weights of 'tiny.gguf' \(.*Q1_0.*; pass a file in other"
    ):
        load_model(file)
    file.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(UnsupportedModelError, match="cannot read 'tiny.gguf': .*; download it again, or pass the orig"):
        load_model(file)
