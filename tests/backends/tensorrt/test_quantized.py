"""Weights in 4 and 8 bits: what networks compute, what the evaluator reads, and what is refused before building."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from exportable_cache import ExportableCache, Session, export
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.experts import experts_of, factor_of, set_quantized
from exportable_cache.models.loading.loading import load_to_quantise
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.sizes import coverage_of, quantized_bytes
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.models.rounding import (
    Float4Linear,
    Float8Linear,
    float4_factor,
    float4_values,
    float4_weight,
    float8_rounded,
    rounded_blocks,
)
from exportable_cache.verification.verify import verify_session

from ...support import checkpoints
from ...support.models import among

pytest.importorskip("exportable_cache.backends.tensorrt.upstream", reason="no tensorrt extra is installed")

from exportable_cache.backends.tensorrt.options import TensorRTOptions
from exportable_cache.backends.tensorrt.quantized import packed, unpacked
from exportable_cache.backends.tensorrt.target import backend, engine_networks

from .evaluator.networks import Net, assert_caught, assert_same, random, trt
from .models import engine_model
from .programs import network_session, program_of

#: Rows of 64 and 128 weights, which groups of 32 divide.
SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
SCHEMES = {
    "4w": Quantization("4w", 32, "8w"),
    "8w": Quantization("8w", embeddings="8w"),
    "fp8": Quantization("fp8", embeddings="8w"),
    "nvfp4": Quantization("nvfp4", embeddings="8w"),
}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("4w", torch.float16),
        ("nvfp4", torch.float32),
        pytest.param("8w", torch.float32, marks=pytest.mark.full),
    ],
)
def test_networks_equal_the_quantised_model(scheme: str, dtype: torch.dtype) -> None:
    """Compare with the model that has the same integers, so that the difference is rounding alone."""
    model = engine_model("llama", **SIZES)
    quantised = quantize(model, SCHEMES[scheme], dtype=dtype).model
    program = program_of(quantised)
    networks = engine_networks(program, TensorRTOptions())
    report = verify_session(network_session(quantised, program, networks), quantised, prompts=[3, 20], decode_steps=8)
    assert report.passed, str(report)
    for network in networks.values():
        # Queries, keys and values at once, the output, three of the MLP, the table and the head.
        assert network.layer_counts["DEQUANTIZE"] == (13 if scheme == "nvfp4" else 7)
        stored = [one.dtype for one in network.constants.values()]
        assert stored.count(torch.uint8) == {"4w": 6, "8w": 0, "nvfp4": 12}[scheme]
    # And not the model before quantisation, whose logits are farther away.
    other = verify_session(network_session(quantised, program, networks), model, prompts=[3], decode_steps=8)
    assert other.max_difference > 10 * report.max_difference


def test_networks_keep_the_integers_of_a_checkpoint(tmp_path: Path) -> None:
    """Check that a network of a GPTQ checkpoint holds its integers, and equals the dequantised model."""
    plain = checkpoints.write_gptq(tmp_path, engine_model("llama", **SIZES), act_order=True)
    loaded = load_to_quantise(tmp_path, keep=True)
    kept = quantize(loaded.model, Quantization("keep", kept="symmetric"), stored=loaded.integers).model
    program = program_of(kept)
    networks = engine_networks(program, TensorRTOptions())
    report = verify_session(
        network_session(kept, program, networks), plain, prompts=[3, 20], decode_steps=8, tolerance=1e-5
    )
    assert report.passed, str(report)
    for network in networks.values():
        found = {one.numpy().tobytes() for one in network.constants.values() if one.dtype == torch.uint8}
        assert {packed(one.integers).numpy().tobytes() for one in loaded.integers.values()} == found


@pytest.mark.parametrize("dtype", among([torch.float32, torch.float16, torch.bfloat16], fast=[torch.bfloat16]))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_model_computes_in_the_dtype(scheme: str, dtype: torch.dtype) -> None:
    model, quantization = engine_model("llama", **SIZES), SCHEMES[scheme]
    quantised = quantize(model, quantization, dtype=dtype)
    logits = quantised.model(torch.tensor([[1, 2, 3]])).logits
    assert logits.dtype == dtype == quantised.model.dtype
    expected = model(torch.tensor([[1, 2, 3]])).logits
    spread = expected.std().item()
    limit = {"4w": 1.0, "8w": 0.2, "fp8": 0.4, "nvfp4": 1.0}[scheme]
    assert (logits.float() - expected).abs().max() < limit * spread
    assert quantised.weights_bytes == quantized_bytes(model, quantization, dtype)
    found = coverage_of(model, quantization, dtype)
    assert found.quantized_bytes + found.other_bytes == quantised.weights_bytes


def test_networks_equal_the_model_in_float8() -> None:
    """Compare in float32, where both round the same values, so that a wrong scale or rounding shows."""
    model = engine_model("llama", **SIZES)
    quantised = quantize(model, SCHEMES["fp8"]).model
    program = program_of(quantised)
    networks = engine_networks(program, TensorRTOptions())
    report = verify_session(
        network_session(quantised, program, networks), quantised, tolerance=1e-4, prompts=[3, 20], decode_steps=8
    )
    assert report.passed, str(report)
    # Projections of queries, keys and values read one tensor, and so do two of the MLP; the head is the fifth.
    assert networks["decode"].layer_counts["QUANTIZE"] == 5
    projection = quantised.model.layers[0].mlp.down_proj
    assert isinstance(projection, Float8Linear) and projection.bits.dtype == torch.uint8
    projection.input_scale *= 2**8
    other = verify_session(
        network_session(quantised, program, networks), quantised, tolerance=1e-4, prompts=[3], decode_steps=8
    )
    assert not other.passed


def test_values_are_rounded_to_float8() -> None:
    values = torch.tensor([1.0, 1.06, 1.07, -900.0, 2.0**-10, 0.0])
    assert float8_rounded(values, 1.0).tolist() == [1.0, 1.0, 1.125, -448.0, 0.0, 0.0]
    assert float8_rounded(values, 4.0).tolist() == [1.0, 1.0, 1.125, -896.0, 0.0, 0.0]
    layer = Float8Linear(torch.nn.Linear(64, 8), largest=3.0, dtype=torch.float16)
    # Mamba and DeepSeek V3.2 cast inputs to the dtype of a weight.
    assert layer.weight.dtype == torch.float16 and layer.weight.shape == (8, 64)
    # Four times the largest fits.
    assert layer.input_scale == 2**-5 and 4 * 3.0 <= 448 * layer.input_scale
    assert Float8Linear(torch.nn.Linear(64, 8), 0.0, torch.float16).input_scale == 2**-14


@pytest.mark.parametrize("swapped", [False, True])
def test_float8_is_quantised_and_dequantised(swapped: bool) -> None:
    values, scale = 100 * random(4, 4), torch.tensor(0.25)
    net = Net()
    scales = net.constant(scale)
    made = net.add_quantize(net.constant(values), scales, trt.DataType.FP8)
    back = net.add_dequantize(made.get_output(0), scales, trt.float32)
    result = net.evaluator(back.get_output(0)).run({})["out0"]
    expected = float8_rounded(values, 0.5 if swapped else 0.25)
    (assert_caught if swapped else assert_same)(result, expected)


@pytest.mark.parametrize(("scheme", "least", "fitting"), [("fp8", 89, "89,120"), ("nvfp4", 120, "120")])
def test_floats_are_refused_for_a_capability_without_them(
    scheme: str, least: int, fitting: str, tmp_path: Path
) -> None:
    for sm, given in ((None, "none, which is a plan for SM 80 and later"), ("86,120", "86, 120")):
        options = {} if sm is None else {"sm": sm}
        message = f"sm must be {least} and later with quantize='{scheme}', .* got {given}; pass sm='{fitting}' "
        with pytest.raises(InputError, match=message):
            export(engine_model("llama", **SIZES), "tensorrt", 64, tmp_path / "out", quantize=scheme, **options)


def test_weights_are_rounded_to_blocks_of_four_bit_floats() -> None:
    """Compare with values by hand: halfway between two, the one whose last bit is 0; and one scale per block."""
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.76, -1.3, -2.6, -0.2, 0.0, 5.1, -6.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0, -1.5, -3.0, -0.0, 0.0, 6.0, -6.0]
    weight = torch.tensor([halves + [3.0] * 16, [0.0] * 32])
    # The scales 1, 0.5 and the smallest; the last holds zeros.
    pairs, scale = rounded_blocks(weight, 1.0, 16)
    assert scale.view(torch.float8_e4m3fn).float().tolist() == [[1.0, 0.5], [2.0**-9, 2.0**-9]]
    assert float4_values(pairs).tolist() == [expected + [6.0] * 16, [0.0] * 32]
    # The first of a pair is in the lower bits, as TensorRT reads them.
    assert pairs[0, 1] == 0b0100_0010 and float4_weight(pairs, scale, 0.25, torch.float16)[0, 31] == 0.75
    # The largest scale, 448, belongs to the largest magnitude.
    pairs, scale = rounded_blocks(weight, float4_factor(6.0), 16)
    assert scale.view(torch.float8_e4m3fn).float()[0].tolist() == [448.0, 224.0]
    assert 0 < float4_factor(0.0) and 0 < float4_factor(1e-42)


@pytest.mark.parametrize("swapped", [False, True])
def test_four_bit_floats_are_dequantised_twice(swapped: bool) -> None:
    """Build FP4 values in blocks of 16 whose scales are float8 values with a factor."""
    pairs, scale = rounded_blocks(random(4, 32), factor := float4_factor(random(4, 32).abs().max().item()), 16)
    net = Net()
    tensors = {"values": (pairs >> 4 | pairs << 4 if swapped else pairs), "scale": scale}
    made = {}
    for name, dtype, shape in (("values", trt.DataType.FP4, (4, 32)), ("scale", trt.DataType.FP8, (4, 2))):
        layer = net.add_constant(shape, trt.Weights(dtype, tensors[name].data_ptr(), shape[0] * shape[1]))
        layer.name, net.constants[name] = name, tensors[name]
        made[name] = layer.get_output(0)
    scales = net.add_dequantize(made["scale"], net.constant(torch.tensor(factor)), trt.float16)
    result = net.evaluator(net.add_dequantize(made["values"], scales.get_output(0), trt.float16).get_output(0)).run({})
    (assert_caught if swapped else assert_same)(result["out0"], float4_weight(pairs, scale, factor, torch.float16))


def test_rows_that_a_block_does_not_divide_are_refused() -> None:
    model = engine_model("llama", **{**SIZES, "intermediate_size": 72})
    message = "blocks divide the rows of model.layers.0.mlp.down_proj of Llama.*, 72 weights long, got 'nvfp4' with"
    with pytest.raises(InputError, match=message):
        quantize(model, SCHEMES["nvfp4"])


def test_a_checkpoint_in_nvfp4_gets_its_values_back(tmp_path: Path) -> None:
    """Round dequantised weights again, whose largest value in each block is 6 times its scale."""
    checkpoints.write_compressed(tmp_path, "nvfp4")
    loaded = load_to_quantise(tmp_path).model
    before = {path: one.weight.detach().clone() for path, one in checkpoints.linears_of(loaded).items()}
    quantised = quantize(loaded, SCHEMES["nvfp4"]).model
    layers = {path: one for path, one in quantised.named_modules() if isinstance(one, Float4Linear) and path in before}
    # Layers of queries, keys and values share a factor, and have factors of their own in this checkpoint.
    alone = [path for path in layers if path.endswith(("o_proj", "down_proj"))]
    assert len(alone) == 2 * loaded.config.num_hidden_layers
    for path in alone:
        one = layers[path]
        again = float4_weight(one.bits, one.weight_scale, one.factor, torch.float32)
        torch.testing.assert_close(again, before[path], rtol=1e-6, atol=0)


def test_pairs_of_integers_come_back() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8)
    assert torch.equal(unpacked(packed(values)), values)
    # TensorRT's documentation: the first of two is in the lower bits.
    assert packed(torch.tensor([1, -2], dtype=torch.int8)).tolist() == [0xE1]


def _dequantised(swap: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of a network that dequantises 4-bit weights in blocks of 4, and the expected one."""
    integers = torch.randint(-8, 8, (6, 8), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = random(6, 2, dtype=torch.float16)
    net = Net()
    pairs = packed(integers.view(-1, 2).flip(1) if swap else integers)
    layer = net.add_constant((6, 8), trt.Weights(trt.DataType.INT4, pairs.data_ptr(), integers.numel()))
    layer.name = "integers"
    net.constants["integers"] = pairs
    made = net.add_dequantize(layer.get_output(0), net.constant(scale), trt.float16)
    result = net.evaluator(made.get_output(0)).run({})["out0"]
    return result, integers.to(torch.float16) * scale.repeat_interleave(4, 1)


def test_blocks_of_four_bits_are_dequantised() -> None:
    result, expected = _dequantised()
    assert_same(result, expected)


def test_swapped_pairs_show() -> None:
    assert_caught(*_dequantised(swap=True))


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_are_quantised_and_dequantised(axis: int) -> None:
    values, scale = random(4, 4), random(4).abs() / 50
    net = Net()
    integers = net.add_quantize(net.constant(values), net.constant(scale), trt.int8)
    integers.axis = axis
    back = net.add_dequantize(integers.get_output(0), net.constant(scale), trt.float32)
    back.axis = axis
    result = net.evaluator(back.get_output(0)).run({})["out0"]
    of_each = scale[:, None] if axis == 0 else scale
    assert_same(result, (values / of_each).round().clamp(-128, 127) * of_each)


def test_four_bits_are_refused_for_a_capability_without_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantize must be '8w' for SM 75, got '4w'"):
        export(engine_model("llama", **SIZES), "tensorrt", 64, tmp_path / "out", quantize="4w", sm="75,80")


def test_bfloat16_is_refused_for_a_capability_without_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype must be float16 or float32 for SM 75, got bfloat16"):
        # Without weights, too, because a config names the dtype.
        export(engine_model("llama", torch.bfloat16, **SIZES), "tensorrt", 64, tmp_path / "out", sm=75, dry_run=True)


@pytest.mark.parametrize(
    ("family", "scheme", "dtype"),
    [
        ("mixtral", "4w", torch.float16),
        ("gpt_oss", "8w", torch.float32),
        ("mixtral", "fp8", torch.float32),
        ("gpt_oss", "nvfp4", torch.float32),
    ],
)
def test_networks_have_the_integers_of_experts(family: str, scheme: str, dtype: torch.dtype) -> None:
    """Compare with the model that has the same integers; GPT-OSS has biases, and its weights are transposed."""
    only = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {}
    model = engine_model(family, **SIZES, **only)
    quantised = quantize(model, SCHEMES[scheme].for_target("symmetric", backend.expert_schemes), dtype=dtype).model
    program = program_of(quantised)
    networks = engine_networks(program, TensorRTOptions())
    experts = dict(experts_of(quantised)).popitem()[1]
    integers = experts.down_proj.detach()
    stored = torch.stack([packed(one) for one in integers]) if scheme == "4w" else integers
    found = [one.numpy().tobytes() for one in networks["decode"].constants.values() if one.dtype == stored.dtype]
    assert found.count(stored.numpy().tobytes()) == 1 and len(integers) == 4
    session = network_session(quantised, program, networks)
    # Not the usual one, because that of models which round activations allows for it.
    tolerance = 1e-4 if scheme == "fp8" else None
    report = verify_session(session, quantised, prompts=[3, 20], decode_steps=8, tolerance=tolerance)
    assert report.passed, str(report)
    # A new tensor, because the network has the address of the other.
    scale, factor = experts.down_proj_scale, factor_of(experts, "down_proj")
    assert (factor == 1) is (scheme in ("4w", "8w"))
    scale, factor = (1.5 * scale.detach(), 1.0) if factor == 1 else (scale, 1.5 * factor)
    set_quantized(experts, "down_proj", integers, scale, rounds=False, factor=factor)
    assert not verify_session(session, quantised, prompts=[20], decode_steps=8).passed


def test_experts_that_stay_in_float_are_refused_by_name() -> None:
    quantised = quantize(engine_model("mixtral", **SIZES), SCHEMES["fp8"]).model
    with pytest.raises(
        UnsupportedModelError, match=r"experts of MixtralForCausalLM \(model\.layers\.0\.mlp\.experts\).*got floats"
    ):
        program_of(quantised)


def test_a_tied_table_alone_is_refused_by_the_name_of_its_head() -> None:
    """The head rounds its inputs then, for which TensorRT has no operators."""
    quantised = quantize(engine_model("llama", **SIZES, tie_word_embeddings=True), Quantization(embeddings="8w")).model
    with pytest.raises(UnsupportedModelError, match="lm_head of Llama.* must not round its inputs.*quantize='8w'"):
        program_of(quantised)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inputs_and_weights_that_are_not_finite_are_refused_by_layer(value: float) -> None:
    model = copy.deepcopy(engine_model("llama", **SIZES))
    model.model.norm.weight.data[3] = value
    with pytest.raises(UnsupportedModelError, match=f"inputs of lm_head of Llama.* must be finite .* got {value}: the"):
        quantize(model, SCHEMES["fp8"])
    model = copy.deepcopy(engine_model("llama", **SIZES))
    model.lm_head.weight.data[3, 3] = value
    with pytest.raises(UnsupportedModelError, match="weights of lm_head of Llama.* must be finite"):
        quantize(model, SCHEMES["fp8"])


def test_float8_is_refused_for_encoder_decoders() -> None:
    """The inputs of their layers need an encoder's input, too."""
    with pytest.raises(UnsupportedModelError, match="quantize must not be 'fp8' for encoder-decoders such as T5For"):
        quantize(T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=64, d_kv=16, d_ff=64)), SCHEMES["fp8"])


def test_quantized_logits_that_overflow_have_no_tolerance() -> None:
    model = copy.deepcopy(engine_model("llama", **SIZES))
    model.lm_head.weight.data *= 1e7
    quantized = quantize(model, SCHEMES["fp8"], dtype=torch.float16).model
    session = Session.from_model(quantized, ExportableCache.from_model(quantized, 16), buckets=False)
    with pytest.raises(UnsupportedModelError, match="logits of the quantized Llama.* must be finite, .* in float16"):
        verify_session(session, quantized, prompts=[3], decode_steps=1)
