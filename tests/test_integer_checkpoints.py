"""GPTQ, AWQ and compressed-tensors checkpoints, read without the packages that wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.loading import integers, prequantized
from exportable_cache.models.loading.integers import unpack
from exportable_cache.models.loading.loading import load_model
from exportable_cache.models.loading.location import Location, shards
from exportable_cache.models.rounding import float4_factor, float4_weight, rounded_blocks

from .support import checkpoints


def assert_equal(left: PreTrainedModel, right: PreTrainedModel, share: float = 0.0) -> None:
    """Check that all weights of two models are equal, or differ by at most a share of themselves."""
    for (name, one), other in zip(left.named_parameters(), right.parameters(), strict=True):
        assert ((one - other).abs() <= share * other.abs()).all(), name


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write a checkpoint again after a change of its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"version": "gptq_v2"},
        {"sym": False},
        {"sym": False, "version": "gptq_v2"},
        {"act_order": True},
        {"act_order": True, "sym": False, "bits": 8},
        {"bits": 8, "version": "gptq_v2"},
        {"bits": 2, "sym": False},
        {"group": -1},
        {"group": 16, "dtype": torch.bfloat16},
    ],
    ids=lambda form: "-".join(f"{name}={value}" for name, value in form.items()) or "plain",
)
def test_gptq_weights_are_read_exactly(form: dict[str, Any], tmp_path: Path) -> None:
    """Compare with weights that were packed one number at a time."""
    expected = checkpoints.write_gptq(tmp_path, **form)
    loaded = load_model(tmp_path)
    assert_equal(loaded.model, expected)
    assert getattr(loaded.model.config, "quantization_config", None) is None
    assert loaded.remarks[0].startswith(f"weights are stored quantised (gptq, {form.get('bits', 4)} bits")


def test_awq_weights_are_read_exactly(tmp_path: Path) -> None:
    """Compare with weights that were packed one number at a time."""
    expected = checkpoints.write_awq(tmp_path)
    assert_equal(load_model(tmp_path).model, expected)


def test_weights_are_rounded_once_to_the_requested_dtype(tmp_path: Path) -> None:
    """Check that a load in float16 rounds the exact product."""
    expected = checkpoints.write_gptq(tmp_path, sym=False)
    assert_equal(load_model(tmp_path, "float16").model, expected.half())


@pytest.mark.parametrize(
    ("pack", "fields"),
    [(checkpoints.gptq_layer, checkpoints.gptq_fields()), (checkpoints.awq_layer, checkpoints.AWQ_FIELDS)],
    ids=["gptq", "awq"],
)
def test_experts_are_merged_after_they_are_read(pack: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    """Check experts that a checkpoint stores one by one, and the model in one tensor."""
    checkpoints.wide_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64).save_pretrained(
        tmp_path
    )
    generator, packed, values = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in name:
            layer = name.removesuffix(".weight")
            packed[layer], values[layer] = pack(tensor.shape, generator)
    checkpoints.replace_layers(tmp_path, packed)
    checkpoints.edit_config(tmp_path, quantization_config=fields)
    loaded = load_model(tmp_path).model
    experts = loaded.model.layers[1].mlp.experts
    for expert in range(len(experts.down_proj)):
        gate, up, down = (
            values[f"model.layers.1.mlp.experts.{expert}.{name}"] for name in ("gate_proj", "up_proj", "down_proj")
        )
        assert torch.equal(experts.gate_up_proj[expert], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[expert], down)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in checkpoints.COMPRESSED), ("int4", "fp8"), ("int8", "int4")])
def test_compressed_tensors_are_read_as_by_their_package(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare each format, and two in one checkpoint, with the package's own decompression."""
    pytest.importorskip("compressed_tensors")
    expected = checkpoints.write_compressed(tmp_path, *kinds)
    monkeypatch.setattr(prequantized.util, "find_spec", lambda name: None)
    # The package dequantises NVFP4 in bfloat16.
    assert_equal(load_model(tmp_path).model, expected, 2**-8 if kinds == ("nvfp4",) else 0.0)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_any_width_are_unpacked(bits: int) -> None:
    """Compare with numbers that were packed bit by bit."""
    count = 37
    numbers = torch.randint(2**bits, (2, count), generator=torch.Generator().manual_seed(0))
    rows = []
    for row in numbers.tolist():
        whole = sum(number << (bits * place) for place, number in enumerate(row))
        rows.append([whole >> (32 * word) & 0xFFFFFFFF for word in range(-(-count * bits // 32))])
    words = torch.tensor(rows, dtype=torch.int64).to(torch.int32)
    assert torch.equal(unpack(words, bits, count).long(), numbers)


# -- files that cannot be read


@pytest.mark.parametrize(("version", "said"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zero_points_of_the_other_convention_are_refused(version: str, said: str, tmp_path: Path) -> None:
    """Check that a config which names the wrong convention is refused with the right one."""
    checkpoints.write_gptq(tmp_path, version=version)
    # Without `sym`, and in capitals, which hubs have, too.
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": said.upper()}
    checkpoints.edit_config(tmp_path, quantization_config=fields)
    with pytest.raises(
        InputError, match=f"config.json says '{said}'.*off by one.*set checkpoint_format to '{version}'"
    ):
        load_model(tmp_path)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, r"gptq with bits=3, and only 2, 4, 8 are read; pass the original checkpoint"),
        ({"bits": "4"}, "bits='4', and only 2, 4, 8 are read"),
        ({"group_size": 0}, "group_size=0, which must be -1 or a positive integer"),
        ({"checkpoint_format": "marlin"}, "the packing 'marlin', and only gptq and gptq_v2 are read"),
        ({"quant_method": "awq", "version": "gemv"}, "awq with the packing 'gemv', and only gemm are read"),
        ({"quant_method": "awq", "bits": 8}, "awq with bits=8, and only 4 are read"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "the format 'marlin-24', and only pack-quantized",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "the format 'sparse-24-bitmask'",
        ),
    ],
)
def test_forms_that_are_not_read_are_refused_by_the_config(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Check that a form which is not read is refused before the weights are opened."""
    checkpoints.wide_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    checkpoints.edit_config(tmp_path, quantization_config={**GPTQ, **fields})
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8}, r"those of 4 bits, and config.json says bits=8; config.json and the shards do not belong"),
        ({"group_size": 64}, r"groups of scales do not divide \d+ inputs in groups of 64"),
    ],
)
def test_a_config_that_does_not_fit_the_shapes_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that headers are compared with the config before a model is allocated."""
    checkpoints.write_gptq(tmp_path)
    checkpoints.edit_config(tmp_path, quantization_config={**GPTQ, **fields})
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("the model was allocated"))
    with pytest.raises(InputError, match=f"the weights of model.layers.*{message}"):
        load_model(tmp_path)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.qweight"] = tensors[f"{LAYER}.qweight"][:-1].contiguous()


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(f"{LAYER}.{name}")  # type: ignore[return-value]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.scales"][0, 0] = float("nan")


def _huge(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.scales"] = torch.full_like(tensors[f"{LAYER}.scales"].float(), 3e38)


def _uneven(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.g_idx"][:] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, rf"{LAYER}: g_idx must be \[120\], got \[128\]"),
        (_without("qzeros"), f"{LAYER}: qzeros is missing"),
        (_without("scales"), f"{LAYER}: scales is missing"),
        (_without("g_idx"), f"{LAYER}: g_idx is missing, and config.json says desc_act"),
        (_nan, f"{LAYER}: scales must be finite, got infinities or not-a-number"),
        (_huge, f"{LAYER}: weights must be finite in torch.float32, got infinities"),
        (_uneven, f"{LAYER}: the group index must have each of 4 groups 32 times"),
    ],
    ids=["cut", "no-zeros", "no-scales", "no-index", "nan", "huge", "uneven"],
)
def test_damaged_layers_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    """Check that each fault of a layer is one sentence with the layer and the remedy."""
    checkpoints.write_gptq(tmp_path, checkpoints.wide_model(intermediate_size=128), act_order=True)
    changed(tmp_path, change)
    with pytest.raises(InputError, match=f"the weights of {message}.*download the checkpoint again"):
        load_model(tmp_path)


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    """Check that a file which ends early is found by its header."""
    checkpoints.write_gptq(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"cannot read model.safetensors: .*truncated or damaged, download it again"):
        load_model(tmp_path)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    """Check that the index of shards is compared with the files."""
    checkpoints.write_gptq(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(InputError, match="has no file model-2.safetensors, which model.safetensors.index.json names"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cannot read model.safetensors.index.json of .*download it again"),
        ('{"weight_map": {"a": "../secret"}}', "must name files of the checkpoint, got '../secret'; download it again"),
        ('{"weight_map": {"a": "/secret"}}', "must name files of the checkpoint, got '/secret'; download it again"),
    ],
    ids=["nested", "parent", "absolute"],
)
def test_an_index_that_is_no_list_of_the_folder_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Check that an index neither exhausts the stack nor names files elsewhere."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=message):
        shards(Location(str(tmp_path), "tiny", True))


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**64 - 1]])
def test_shapes_that_no_tensor_has_are_refused(shape: list[int], tmp_path: Path) -> None:
    """Check that an empty tensor of a shape beyond 64 bits is refused by the file's name."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="cannot read model.safetensors: .*download it again"):
        integers.check_shards([path], "gptq", GPTQ)


BLOCKS = {"config_groups": {"a": {"weights": {"num_bits": 8, "block_structure": [2**62, 2**62]}}}}


@pytest.mark.parametrize(
    ("dtype", "extra", "message"),
    [
        (torch.int8, {"weight_zero_point": torch.full((4, 1), 200, dtype=torch.uint8)}, "weight_zero_point must be"),
        (torch.int8, {"weight_zero_point": torch.full((4, 1), 0.5)}, "weight_zero_point must be integers from -128"),
        (torch.int8, {"weight_scale": torch.ones(4, 0)}, "weight_scale must be a matrix"),
        (torch.float8_e4m3fn, {"weight_scale": torch.ones(5, 1)}, r"weight_scale \[5, 1\] does not fit"),
    ],
    ids=["range", "float", "empty", "blocks"],
)
def test_layers_of_8_bits_that_do_not_fit_are_refused(
    dtype: torch.dtype, extra: dict[str, torch.Tensor], message: str
) -> None:
    """Check zero points before they are cast, and scales before they are spread."""
    tensors = {"weight": torch.ones(4, 8).to(dtype), "weight_scale": torch.ones(4, 1), **extra}
    with pytest.raises(InputError, match=f"the weights of a: {message}"):
        integers.read_compressed(integers._Layer("a", tensors), BLOCKS)


def test_groups_and_blocks_larger_than_the_layer_are_those_of_the_layer() -> None:
    """Check that no memory is taken for inputs which a layer does not have."""
    assert integers._group_size({"group_size": 2**62}, 64, 1) == 64
    tensors = {"weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "weight_scale": torch.full((1, 1), 2.0)}
    assert torch.equal(integers.read_compressed(integers._Layer("a", tensors), BLOCKS), torch.full((4, 8), 2.0))


def test_a_compressed_layer_that_the_config_does_not_describe_is_refused(tmp_path: Path) -> None:
    """Check that bits and groups of the shapes are those of a scheme."""
    pytest.importorskip("compressed_tensors")
    checkpoints.write_compressed(tmp_path, "int4")
    weights = {"num_bits": 4, "strategy": "group", "group_size": 64}
    fields = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": weights}},
    }
    checkpoints.edit_config(tmp_path, quantization_config=fields)
    with pytest.raises(
        InputError, match="those of 4 bits in groups of 32, and config.json says 4 bits in groups of 64"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("int8", "weight_scale", "weight_scale is missing"),
        ("fp8", "weight_scale", "weight_scale is missing"),
        ("int4-zeros", "weight_zero_point", "weight_zero_point is missing, and config.json says that weights are not"),
        ("nvfp4", "weight_global_scale", "weight_global_scale must be one number"),
    ],
)
def test_a_compressed_layer_without_one_of_its_tensors_is_refused(
    kind: str, name: str, message: str, tmp_path: Path
) -> None:
    """Check that integers are not taken for weights, nor a layer read with another scale."""
    pytest.importorskip("compressed_tensors")
    checkpoints.write_compressed(tmp_path, kind)
    changed(tmp_path, _without(name))
    with pytest.raises(InputError, match=f"{LAYER}: {message}"):
        load_model(tmp_path)


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    """Check that a checkpoint with static scales of activations is read, because activations stay in float."""
    pytest.importorskip("compressed_tensors")
    expected = checkpoints.write_compressed(tmp_path, "int8")
    changed(tmp_path, lambda tensors: tensors.update({f"{LAYER}.input_scale": torch.ones(1)}))
    assert_equal(load_model(tmp_path).model, expected)


def write_modelopt(folder: Path, algorithm: str) -> PreTrainedModel:
    """Write a Llama in a form of ModelOpt, and return the model that its values make."""
    model, packed = checkpoints.wide_model(), {}
    for name, layer in checkpoints.linears_of(model).items():
        factor = float4_factor(layer.weight.abs().max().item())
        pairs, scale = rounded_blocks(layer.weight, factor, 16)
        parts = {"weight": pairs, "weight_scale": scale.view(torch.float8_e4m3fn)}
        parts["weight_scale_2"] = torch.tensor(factor)
        values = float4_weight(pairs, scale, factor, torch.float32)
        if algorithm == "FP8":
            parts = {"weight": (layer.weight / 0.01).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.01)}
            values = parts["weight"].float() * parts["weight_scale"]
        layer.weight.data = values
        packed[name] = {**parts, "input_scale": torch.tensor(0.5)}
    model.save_pretrained(folder)
    checkpoints.replace_layers(folder, packed)
    checkpoints.edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
    return model


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_checkpoints_of_modelopt_are_read(algorithm: str, tmp_path: Path) -> None:
    expected = write_modelopt(tmp_path, algorithm)
    loaded = load_model(tmp_path)
    assert_equal(loaded.model, expected, 1e-6)
    assert ("'nvfp4' for target tensorrt" in " ".join(loaded.remarks)) is (algorithm == "NVFP4")
    # A layer without one of its scales is not read with another one.
    changed(tmp_path, _without("weight_scale_2" if algorithm == "NVFP4" else "weight_scale"))
    with pytest.raises(InputError, match="weight_scale_2 must be one number|weight_scale is missing"):
        load_model(tmp_path)
    checkpoints.edit_config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    with pytest.raises(UnsupportedModelError, match="the algorithm 'NVFP4_AWQ', and only NVFP4 and FP8 are read"):
        load_model(tmp_path)
