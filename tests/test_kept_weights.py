"""Integers of quantised checkpoints that a program stores unchanged (`quantize="keep"`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from exportable_cache import export, load
from exportable_cache.errors import InputError
from exportable_cache.models.loading.gguf_blocks import TYPES
from exportable_cache.models.loading.integers import kept_tensors
from exportable_cache.models.loading.loading import load_model, load_to_quantise
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization, quantization_of
from exportable_cache.verification.verify import verify

from .support import checkpoints
from .support.models import tokens
from .support.store import REPOSITORY

pytest.importorskip("torchao", reason="the executorch extra is not installed")

CAPACITY = 48


def keep(kept: str) -> Quantization:
    return Quantization("keep", kept=kept)


def write(folder: Path, kind: str, **form: Any) -> None:
    {"gptq": checkpoints.write_gptq, "awq": checkpoints.write_awq}[kind](folder, **form)


def _compressed(kind: str, folder: Path) -> None:
    pytest.importorskip("compressed_tensors")
    checkpoints.write_compressed(folder, kind)


def _gguf(kind: str, folder: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    checkpoints.write_gguf(folder / "tiny.gguf", kinds_of_weights=[kind], **sizes)


def _names(line: str, row: str) -> bool:
    """Return True if a line of the table is that of a format; GGUF's lines list several types."""
    first = line.split("|")[1].strip()
    if row.startswith("GGUF: ") and row != "GGUF: other":
        listed = first.removeprefix("GGUF: ").split(", ")
        return first.startswith("GGUF: ") and row.removeprefix("GGUF: ") in listed
    return first.startswith(row)


@pytest.mark.parametrize(
    ("kind", "form", "kept"),
    [
        ("gptq", {}, "affine"),
        ("gptq", {"sym": False, "act_order": True}, "4w"),
        ("gptq", {"bits": 8, "sym": False}, "affine"),
        ("gptq", {"bits": 8, "sym": False, "group": 16}, "native"),
        ("awq", {}, "native"),
    ],
    ids=["symmetric", "act-order", "8-bits", "8-bits-native", "awq"],
)
@torch.no_grad()
def test_integers_are_kept_and_logits_are_those_of_the_dequantised_model(
    kind: str, form: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    """Compare a model over kept integers with the dequantised one."""
    write(tmp_path, kind, **form)
    loaded = load_to_quantise(tmp_path, keep=True)
    assert loaded.remarks == ()
    made = quantize(loaded.model, keep(kept), stored=loaded.integers)
    assert set(made.kept) == {f"{name}.weight" for name in checkpoints.linears_of(loaded.model)} and made.remark == ""
    for name in made.kept:
        assert torch.equal(
            made.model.get_submodule(name.removesuffix(".weight")).weight.qdata, loaded.integers[name].integers
        )
    ids = tokens(9)
    assert (made.model(ids).logits - load_model(tmp_path).model(ids).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("scheme", [4, 8, "8da4w", "8da8w", "asymmetric", "mixed"])
@torch.no_grad()
def test_integers_of_torchao_are_kept(scheme: str | int, tmp_path: Path) -> None:
    """Compare a model over the integers of torchao's schemes with the dequantised one."""
    checkpoints.write_torchao(tmp_path, scheme)
    loaded = load_to_quantise(tmp_path, keep=True)
    assert loaded.remarks == ()
    found = {(one.bits, one.size, one.zero_points is not None) for one in loaded.integers.values()}
    rows = {(8, 64, False)}
    four, asymmetric = {(4, 32, False)}, {(4, 32, True)}
    assert found == {4: four, "8da4w": four, "asymmetric": asymmetric, "mixed": rows | asymmetric}.get(scheme, rows)
    made = quantize(loaded.model, keep("native"), stored=loaded.integers)
    assert set(made.kept) == {f"{name}.weight" for name in checkpoints.linears_of(loaded.model)} and made.remark == ""
    ids = tokens(9)
    assert (made.model(ids).logits - load_model(tmp_path).model(ids).logits).abs().max() <= 1e-5


def test_integers_of_torchao_beyond_their_bits_are_not_kept(tmp_path: Path) -> None:
    """Packing a damaged file's integers to 4 bits would change the weights next to them."""
    checkpoints.write_torchao(tmp_path, 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = kept_tensors(model)
    name = next(iter(before))
    model.get_parameter(name).qdata[0, 0] = 100
    assert set(kept_tensors(model)) == set(before) - {name}


#: Forms of kept integers by the column of the table in docs/guides/checkpoints.md.
FORMS = ("affine", "native", "symmetric")
#: Beginning of a row of the table, how a checkpoint of its format is written, whether it has zero points.
ROWS: list[tuple[str, Callable[[Path], Any], bool]] = [
    ("GPTQ", checkpoints.write_gptq, False),
    ("GPTQ", partial(checkpoints.write_gptq, bits=2, sym=False, act_order=True), True),
    ("GPTQ", partial(checkpoints.write_gptq, bits=8, group=-1), False),
    ("AWQ", checkpoints.write_awq, True),
    ("compressed-tensors, integers", partial(_compressed, "int3"), False),
    ("compressed-tensors, integers", partial(_compressed, "int8"), False),
    ("compressed-tensors, integers", partial(_compressed, "int4-zeros"), True),
    ("compressed-tensors, float8", partial(_compressed, "fp8"), False),
    ("compressed-tensors, float8", partial(_compressed, "nvfp4"), False),
    *((f"GGUF: {kind}", partial(_gguf, kind), False) for kind in TYPES),
    ("GGUF: other", partial(_gguf, "TQ1_0"), False),
    ("torchao: 4 bits", partial(checkpoints.write_torchao, scheme="8da4w"), False),
    ("torchao: 4 bits", partial(checkpoints.write_torchao, scheme="asymmetric"), True),
    ("torchao: 8 bits", partial(checkpoints.write_torchao, scheme=8), False),
    ("`fp8` in blocks", checkpoints.write_fp8, False),
    ("`mxfp4`", checkpoints.write_mxfp4, False),
]


@pytest.mark.parametrize(("row", "write", "has_zero_points"), ROWS, ids=[f"{n}-{one[0]}" for n, one in enumerate(ROWS)])
def test_the_table_of_formats_says_what_is_kept(
    row: str, write: Callable[[Path], Any], has_zero_points: bool, tmp_path: Path
) -> None:
    """Write a checkpoint of each row, and compare each target's form with its cell."""
    text = (REPOSITORY / "docs/guides/checkpoints.md").read_text().split("### Which integers are kept")[1]
    lines = [line for line in text.splitlines() if line.startswith("| ") and _names(line, row)]
    assert len(lines) == 1, row
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")][2:]
    write(tmp_path)
    file = tmp_path / "tiny.gguf"
    loaded = load_to_quantise(file if file.exists() else tmp_path, keep=True)
    for form, cell in zip(FORMS, cells, strict=True):
        assert cell.startswith(("kept", "dequantized"))
        if cell.startswith("dequantized") or ("without zero points" in cell and has_zero_points):
            with pytest.raises(InputError, match="needs a checkpoint whose linear layers are integers"):
                quantize(loaded.model, keep(form), stored=loaded.integers)
        else:
            made = quantize(loaded.model, keep(form), stored=loaded.integers)
            assert len(made.kept) >= len(checkpoints.linears_of(loaded.model)) and made.remark == ""


def test_only_layers_of_the_targets_form_are_kept_and_the_others_are_named(tmp_path: Path) -> None:
    """Check that layers with zero points stay in float for a target that has none."""
    checkpoints.write_gptq(tmp_path)
    loaded = load_to_quantise(tmp_path, keep=True)
    odd = "model.layers.0.mlp.up_proj.weight"
    zeros = torch.ones_like(loaded.integers[odd].scales, dtype=torch.int8)
    integers = {**loaded.integers, odd: loaded.integers[odd]._replace(zero_points=zeros)}
    made = quantize(loaded.model, keep("symmetric"), stored=integers)
    assert odd not in made.kept and len(made.kept) == len(integers) - 1
    assert "1 layers, such as model.layers.0.mlp.up_proj, because they have zero points" in made.remark


@pytest.mark.parametrize(
    ("form", "kept", "message"),
    [
        ({"sym": False}, "symmetric", "because they have zero points"),
        ({}, "8da4w", "because bfloat16 does not hold scales in float16 exactly"),
        ({"bits": 8}, "8da4w", "because they have 8 bits"),
        ({"bits": 8}, "4w", "because they have 8 bits"),
        ({"group": 16, "sym": False}, "4w", "because groups of 16 are not a multiple of 32"),
        ({"bits": 8}, "symmetric", "because integers of 8 bits have several scales a row"),
        ({"group": 16, "dtype": torch.bfloat16}, "8da4w", "because groups of 16 are not a multiple of 32"),
    ],
    ids=["zeros", "scales", "8-bits", "8-bits-alone", "small-groups-alone", "8-bit-groups", "small-groups"],
)
def test_forms_that_a_target_does_not_store_are_refused(
    form: dict[str, Any], kept: str, message: str, tmp_path: Path
) -> None:
    """Check that a checkpoint of which nothing is kept is refused with the reason."""
    checkpoints.write_gptq(tmp_path, **form)
    loaded = load_to_quantise(tmp_path, keep=True)
    with pytest.raises(InputError, match=f"{message}; leave it out, which dequantises them"):
        quantize(loaded.model, keep(kept), stored=loaded.integers)


def test_a_float_checkpoint_has_nothing_to_keep() -> None:
    """Check the message for a checkpoint without integers."""
    with pytest.raises(
        InputError, match="quantize='keep' needs a checkpoint whose linear layers are integers.*got none"
    ):
        quantize(checkpoints.wide_model(), keep("affine"))


@pytest.mark.parametrize(
    ("group_size", "embeddings", "name"), [(32, None, "group_size"), (None, "8w", "quantize_embeddings")]
)
def test_options_of_other_schemes_are_refused(group_size: int | None, embeddings: str | None, name: str) -> None:
    """Check that nothing is rounded in addition."""
    with pytest.raises(InputError, match=f"{name} must be left out with quantize='keep'"):
        quantization_of("keep", group_size, embeddings)


@pytest.mark.full
def test_executorch_programs_keep_the_integers(tmp_path: Path) -> None:
    """Export scales that bfloat16 holds to ExecuTorch, whose layers round activations to 8 bits."""
    pytest.importorskip("executorch")
    checkpoints.write_gptq(tmp_path / "model", dtype=torch.bfloat16)
    options = {"kernels": "executorch"}
    bundle = export(tmp_path / "model", "executorch", CAPACITY, tmp_path / "out", quantize="keep", **options)
    assert bundle.manifest.quantization.kept == "8da4w"
    with load(bundle.path) as session, torch.no_grad():
        expected = load_model(tmp_path / "model").model(tokens(9)).logits[:, -1]
        distance = (session.prefill(tokens(9)) - expected).abs().max() / expected.std()
    assert distance <= 0.1


def test_an_adapter_cannot_be_merged_into_kept_integers(tmp_path: Path) -> None:
    """Check that `lora` is refused before a model is loaded."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="lora must be left out with quantize='keep'"):
        export("demo", "pt2", CAPACITY, tmp_path / "out", quantize="keep", lora=tmp_path)


def test_pt2_programs_keep_the_integers(tmp_path: Path) -> None:
    """Export zero points and act-order to `pt2`, compare with the dequantised model, and verify again."""
    checkpoints.write_gptq(tmp_path / "model", checkpoints.wide_model(num_hidden_layers=1), sym=False, act_order=True)
    bundle = export(tmp_path / "model", "pt2", CAPACITY, tmp_path / "out", quantize="keep")
    assert (bundle.manifest.quantization.linear, bundle.manifest.quantization.kept) == ("keep", "affine")
    assert bundle.manifest.quantization.max_difference <= 1e-5
    with load(bundle.path) as session, torch.no_grad():
        expected = load_model(tmp_path / "model").model(tokens(9)).logits[:, -1]
        assert (session.prefill(tokens(9)) - expected).abs().max() <= 1e-5
    assert verify(bundle.path, tmp_path / "model").passed
