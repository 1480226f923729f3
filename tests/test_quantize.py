"""Quantised weights: what is quantised, what stays tied, what is refused, and how a quantised program is judged."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig

from exportable_cache import ExportableCache, Session, export
from exportable_cache.backends import backend_for
from exportable_cache.backends.probe_attention import probe_attention
from exportable_cache.bundle.manifest import Manifest
from exportable_cache.common.patch import ORIGINAL
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models import quantized_rows
from exportable_cache.models.patches.registry import patch_model
from exportable_cache.models.quantization import quantize as quantize_file
from exportable_cache.models.quantization.quantize import check_quantizable, quantize
from exportable_cache.models.quantization.sizes import coverage_of, is_tied, quantizable_linears, quantized_bytes
from exportable_cache.models.quantization.spec import Quantization, quantization_of
from exportable_cache.models.quantized_rows import IndexedTables, QuantizedRows
from exportable_cache.program.inputs.modalities import modalities_of
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec
from exportable_cache.verification.verify import verify, verify_session

from .support.kinds import kind_model
from .support.models import VOCAB, tiny_model, tokens
from .support.multimodal import tiny_multimodal
from .support.seq2seq import tiny_seq2seq
from .zoo.architectures import architectures
from .zoo.build import tiny_model as zoo_model
from .zoo.media import media_rows, tiny_media_model
from .zoo.media_items import item

pytest.importorskip("torchao", reason="the executorch extra is not installed")


def model_of(tied: bool = False, **sizes):
    return tiny_model("llama", **{"hidden_size": 64, "head_dim": 16, "tie_word_embeddings": tied, **sizes})


@torch.no_grad()
def weight_error(model, scheme: Quantization, path: str) -> float:
    before = model.get_submodule(path).weight
    after = quantize(model, scheme).model.get_submodule(path).weight.dequantize()
    return ((before - after).abs() / before.abs().amax(-1, keepdim=True)).max().item()


def test_weights_are_rounded_to_the_bits_asked_for_and_the_original_is_left_alone() -> None:
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path, table = "model.layers.0.self_attn.q_proj", "model.embed_tokens"
    # Half a step of the largest weight: of 127 steps in 8 bits, of 7 in 4 bits, whose scales are rounded to bfloat16 as
    # well.
    assert 0.002 < weight_error(model, Quantization("8da8w"), path) <= 0.5 / 127 + 1e-4
    assert 0.02 < weight_error(model, Quantization("8da4w", 32, scales="absmax"), path) <= 0.5 / 7 + 0.01
    assert weight_error(model, Quantization(embeddings="8w"), table) <= 0.5 / 127 + 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_bytes_are_those_that_a_target_stores() -> None:
    model = model_of(tied=True)
    floats = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)) - 128 * 64
    quantized = quantize(model, Quantization("8da4w", 32, "8w"))
    # Norms in float32; half a byte a weight and a bfloat16 scale per 32; the tied table once, a byte each and a scale
    # per row.
    assert quantized.weights_bytes == 4 * floats + linear // 2 + 2 * linear // 32 + 128 * 64 + 4 * 128


def test_weights_stored_in_bfloat16_are_quantised_as_their_float32_values_are() -> None:
    stored = model_of(tied=True).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in stored.state_dict().items()}
    quantized = quantize(stored, Quantization("8da4w", 32, "8w")).model
    assert quantized.dtype == quantized.config.dtype == torch.float32
    expected = quantize(copy.deepcopy(stored).float(), Quantization("8da4w", 32, "8w")).model.state_dict()
    for name, tensor in quantized.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
    assert stored.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored.state_dict().items())


def test_a_few_rows_at_a_time_compute_what_torchao_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_rows, "_ELEMENTS_AT_ONCE", 1000)
    model, ids = quantize(model_of(tied=False), Quantization("8da4w", 32, "8w")).model, tokens(6)
    parts = []
    original = quantized_rows.rows_of
    monkeypatch.setattr(quantized_rows, "rows_of", lambda *given: parts.append(given) or original(*given))
    with torch.no_grad(), QuantizedRows():
        logits = model(ids).logits
    # Every linear layer in several pieces, and of the table the rows that are asked for.
    assert len(parts) > 15 and any(isinstance(index, torch.Tensor) and len(index) == 6 for _, index in parts)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-5)


def test_who_looks_at_shapes_and_masks_makes_no_weight_float(monkeypatch: pytest.MonkeyPatch) -> None:
    original = model_of(tied=False)
    quantized = quantize(original, Quantization("8da4w", 32, "8w")).model

    def look(query, key, value, attention_mask, kwargs):
        return query.shape, attention_mask.tolist(), sorted(kwargs)

    expected = probe_attention(original, look)
    monkeypatch.setattr(quantized_rows, "_parts", None)
    assert probe_attention(quantized, look) == expected and len(expected) == 2


def test_layers_that_transpose_their_weights_are_run_as_linear_layers() -> None:
    """Falcon's. Without the patch they fail: once they do not, it can go."""
    config = FalconConfig(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, bias=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    quantized = quantize(model, Quantization("8da4w", 32)).model
    assert "FalconLinear" in patch_model(quantized)
    with torch.no_grad():
        layer, x = quantized.transformer.h[0].mlp.dense_h_to_4h, torch.randn(1, 3, 32)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        with pytest.raises(NotImplementedError):
            getattr(type(layer).forward, ORIGINAL)(layer, x)
        plain = model.transformer.h[0].mlp.dense_h_to_4h
        assert torch.equal(plain(x), getattr(type(plain).forward, ORIGINAL)(plain, x))


def test_a_tied_head_keeps_reading_the_table() -> None:
    model = quantize(model_of(tied=True), Quantization("8da4w", 32, "8w")).model
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert table.qdata.data_ptr() == head.qdata.data_ptr() and table.scale.data_ptr() == head.scale.data_ptr()
    untouched = quantize(model_of(tied=True), Quantization("8da4w", 32)).model
    assert is_tied(untouched) and untouched.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("4da4w",), "quantize must be one of 8da4w, 8da8w, 8w, 4w, fp8, nvfp4, keep, or None, got '4da4w'"),
        (("8da4w", None, "2w"), "quantize_embeddings must be one of 8w, 4w, none, or None, got '2w'"),
        (("8da4w", 20), "group_size must be a multiple of 32, got 20"),
        (("8da4w", -32), "group_size must be an int of at least 1, got -32"),
        (("8da8w", 32), "group_size must be left out for 8-bit weights, which have one scale per row, got 32"),
        (("nvfp4", 32), "group_size must be left out for nvfp4, which has one scale per 16 weights, got 32"),
        ((None, 32), "group_size must be given with quantize or quantize_embeddings, got 32"),
    ],
)
def test_schemes_are_checked_at_construction(options: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Quantization(*options)


@pytest.mark.parametrize(
    ("options", "offered", "embeddings"),
    [
        (("8da4w", None, None), ("8w", "4w"), "8w"),
        (("8da8w", None, None), ("8w",), "8w"),
        (("8da4w", None, "4w"), ("8w", "4w"), "4w"),
        (("8da4w", None, "none"), ("8w", "4w"), None),
        (("8w", None, None), (), None),  # a target without tables of integers
    ],
)
def test_the_table_is_quantised_with_the_layers_unless_it_is_said(
    options: tuple, offered: tuple[str, ...], embeddings: str | None
) -> None:
    quantization = quantization_of(*options, offered)
    assert quantization is not None and quantization.embeddings == embeddings


def test_nothing_is_quantised_unless_it_is_asked_for() -> None:
    assert quantization_of(None, None, None, ("8w",)) is None
    assert quantization_of(None, None, "none", ("8w",)) is None


@pytest.mark.parametrize("family", ["t5", "marian"])
def test_encoder_and_decoder_keep_reading_one_table(family: str) -> None:
    model = quantize(tiny_seq2seq(family), Quantization("8da4w", 32, "8w")).model
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding) and one.num_embeddings == VOCAB]
    assert len(tables) > 1
    assert len({one.weight.qdata.data_ptr() for one in (*tables, model.get_output_embeddings())}) == 1


def test_layers_that_a_scheme_cannot_take_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"group_size must divide the rows of .*, 32 weights long, got 64; use a group_size of 32"
    ):
        check_quantizable(tiny_model("llama"), Quantization("8da4w", 64))
    # Of 96 weights, which 96 would divide, and of 64.
    with pytest.raises(InputError, match=r"down_proj .* 96 weights long, got 64; use a group_size of 32 \(--group"):
        check_quantizable(
            tiny_model("llama", hidden_size=64, head_dim=16, intermediate_size=96), Quantization("8da4w", 64)
        )
    with pytest.raises(InputError, match="48 weights long, got 64; use quantize='8da8w', which has no groups"):
        check_quantizable(tiny_model("llama", hidden_size=48, head_dim=12), Quantization("8da4w", 64))
    for linear, remedy in ((None, "use "), ("nvfp4", "use "), ("4w", "use quantize='8w' and ")):
        with pytest.raises(InputError, match=f"got 32; {remedy}quantize_embeddings='8w', which ha(s|ve) no groups"):
            check_quantizable(
                tiny_model("llama", hidden_size=48, head_dim=12),
                Quantization(linear, 32 if linear != "nvfp4" else None, "4w"),
            )
    with pytest.raises(UnsupportedModelError, match="tied to its embeddings.*use quantize_embeddings='8w'"):
        check_quantizable(model_of(tied=True), Quantization("8da4w", 32, "4w"))
    with pytest.raises(UnsupportedModelError, match="has no torch.nn.Linear except its head"):
        check_quantizable(tiny_model("gpt2", n_embd=64, n_layer=1, n_head=4), Quantization("8da4w"))


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (
            "pt2",
            {"quantize": "8da4w"},
            "quantize must be a scheme that target 'pt2' has fast kernels for, got '8da4w'; use 8w, 8da8w",
        ),
        ("executorch", {"quantize": "8w"}, "target 'executorch' has fast kernels for, got '8w'; use 8da4w, 8da8w"),
        # Not as if it were a plan for GPUs.
        ("executorch", {"quantize": "fp8"}, "target 'executorch' has fast kernels for, got 'fp8'; use 8da4w, 8da8w"),
        (
            "executorch",
            {"quantize": "8da4w", "delegate": "tensorrt"},
            "target 'executorch' has fast kernels for, got '8da4w'; use 8w, 4w, fp8, nvfp4",
        ),
        (
            "executorch",
            {"quantize": "fp8", "delegate": "tensorrt"},
            "sm must be 89 and later with quantize='fp8', .* got none",
        ),
        (
            "executorch",
            {"quantize": "4w", "linears": "delegate"},
            "linears must be 'native' with quantize='4w', .*, got 'delegate'; pass linears='native'",
        ),
    ],
)
def test_schemes_without_kernels_are_refused_before_anything_is_loaded(
    tmp_path: Path, target: str, options: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export("no/such-model", target, 32, tmp_path / "out", **options)


@pytest.mark.parametrize("family", ["t5", "whisper", "marian"])
def test_rounding_is_measured_in_encoder_decoders(family: str) -> None:
    sizes = {"d_kv": 16} if family == "t5" else {}
    scheme = Quantization("8da4w", 32)
    quantized = quantize(tiny_seq2seq(family, d_model=64, **sizes), scheme).model
    cache = ExportableCache.from_model(quantized, 16, max_encoder_len=None if family == "whisper" else 12)
    session = Session.from_model(quantized, cache, buckets=False)
    report = verify_session(session, quantized, prompts=[3], decode_steps=4)
    assert report.passed and report.rounding.of_reference > 0 and report.rounding.effect > 1e-3


def test_a_program_is_judged_by_the_quantised_model() -> None:
    model = model_of()
    scheme = Quantization("8da4w", 32)
    quantized = quantize(model, scheme).model
    session = Session.from_model(quantized, ExportableCache.from_model(quantized, 64), buckets=False)
    asked = {"prompts": [3, 20], "decode_steps": 8}
    report = verify_session(session, quantized, **asked)
    assert report.passed and min(prompt.max_difference for prompt in report.prompts) <= 1e-4
    assert f"root mean square {report.rms_difference:.1e} <= {report.rms_tolerance:.0e}" in str(report)
    assert f"ratio of distances {report.rounding.ratio:.2f} <= 1.4" in str(report)
    assert report.rms_difference == max(prompt.rms_difference for prompt in report.prompts)
    # Neither the float model nor other groups pass for it.
    other = quantize(model, Quantization("8da4w", 64)).model
    assert not verify_session(session, model, **asked).passed
    assert not verify_session(session, other, **asked).passed
    # A given limit is the only one.
    given = verify_session(session, quantized, **asked, tolerance=report.max_difference / 2)
    assert not given.passed and given.rounding is None and given.rms_tolerance is None


def test_the_bundle_records_scheme_error_and_bytes(tmp_path: Path) -> None:
    model = model_of(tied=True, vocab_size=2048, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    bundle = export(tmp_path / "model", "pt2", 64, tmp_path / "out", quantize="8w", prefill_chunk=16)
    recorded = Manifest.read(bundle.path).quantization
    assert (recorded.linear, recorded.group_size, recorded.embeddings) == ("8w", None, "8w")
    assert recorded.accuracy_after is None and recorded.positions == 3 * 9
    # Weights alone in 8 bits: equal to the quantised model to rounding, close to the float one.
    assert bundle.manifest.verification["max_difference"] <= 1e-4 < recorded.max_difference < 1.0
    assert bundle.manifest.weights_bytes == quantize(model, Quantization("8w", None, "8w")).weights_bytes
    # Two methods and a tied table, all of it once.
    file = (bundle.path / "program.pt2").read_bytes()
    table = quantize(model, Quantization("8w", None, "8w")).model.get_input_embeddings().weight.qdata
    assert file.count(table[7].numpy().tobytes()) == 1
    assert verify(bundle, tmp_path / "model", prompts=[5], decode_steps=3).passed


def test_coverage_names_what_stays_in_float() -> None:
    model = tiny_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
    found = coverage_of(model, Quantization("8da4w", 32, "8w"))
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert found.left[0] == ("model.layers.*.mlp.experts", experts)
    assert found.quantized_weights + found.other_weights == model.num_parameters()
    assert found.quantized_bytes + found.other_bytes == quantized_bytes(model, Quantization("8da4w", 32, "8w"))
    assert f"only {found.share:.0%} of the weights are quantised" in found.remark
    assert "model.layers.*.mlp.experts" in found.remark


def test_coverage_leaves_out_what_was_not_asked_for() -> None:
    model = tiny_model("llama")
    whole, table = model.num_parameters(), model.get_input_embeddings().weight.numel()
    everything = coverage_of(model, Quantization("8da8w", embeddings="8w"))
    assert everything.remark == "" and everything.quantized_weights + everything.other_weights == whole
    without_table = coverage_of(model, Quantization("8da8w", embeddings="none"))
    assert without_table.remark == "" and without_table.quantized_weights + without_table.other_weights == whole - table
    table_alone = coverage_of(model, Quantization(None, embeddings="8w"))
    assert table_alone.remark == "" and (table_alone.quantized_weights, table_alone.other_weights) == (table, 0)


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
@pytest.mark.parametrize("scheme", ["8da4w", "8w"])
def test_layers_whose_weight_a_model_multiplies_itself_stay_in_float(model_type: str, scheme: str) -> None:
    """Mamba multiplies by the weight of `dt_proj`. Its rows, of 48 weights in published models, need no groups."""
    jamba = {"mamba_dt_rank": 24, "intermediate_size": 64, "attn_layer_period": 2, "attn_layer_offset": 1}
    sizes = {"time_step_rank": 24} if model_type == "mamba" else jamba
    model = tiny_model(model_type, hidden_size=64, **sizes)
    quantization = Quantization(scheme)
    made = quantize(model, quantization)
    weights = {name: one for name, one in made.model.named_parameters() if "dt_proj" in name and "weight" in name}
    assert weights and all(name.endswith("dt_proj.weight") and one.is_floating_point() for name, one in weights.items())
    assert made.weights_bytes == quantized_bytes(model, quantization)
    assert made.model(torch.arange(6)[None]).logits.isfinite().all()
    assert "dt_proj" not in " ".join(quantizable_linears(model)) and "in_proj" in " ".join(quantizable_linears(model))


def test_layers_that_reshape_their_weight_stay_in_float() -> None:
    """Quantized weights of DeepSeek V4's grouped layers had no `view`, so an export ended with an error of torchao."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[0].grouped = DeepseekV4GroupedLinear(32, 64, 2)
    layer = quantize(model, Quantization("8w")).model.model.layers[0]
    assert type(layer.grouped.weight) is torch.nn.Parameter and hasattr(layer.mlp.up_proj, "parametrizations")
    assert layer.grouped(torch.randn(3, 2, 32)).shape == (3, 2, 32)


@pytest.mark.parametrize("scheme", ["8da4w", "8w"])
def test_gemma_3n_has_a_second_table_and_layers_of_four_inputs(scheme: str) -> None:
    """The table for all layers is larger than the layers, and rows of 4 weights were refused."""
    model = kind_model("gemma3n_text")
    quantization = Quantization(scheme, embeddings="8w")
    made = quantize(model, quantization)
    tables = [one for name, one in made.model.named_modules() if name.endswith("embed_tokens_per_layer")]
    assert len(tables) == 1 and hasattr(tables[0], "parametrizations")
    paths = quantizable_linears(model)
    assert "correction_coefs" not in " ".join(paths) and "laurel" in " ".join(paths)
    assert made.weights_bytes == quantized_bytes(model, quantization)
    ids, plain = torch.arange(VOCAB)[None], model.model.embed_tokens_per_layer
    error = (tables[0](ids) - plain(ids)).abs().amax()
    assert 0 < error <= 0.51 / 127 * plain(ids).abs().amax()
    assert "embed_tokens_per_layer" not in coverage_of(model, quantization).remark


@pytest.mark.parametrize(
    ("model_type", "left"),
    [
        ("longcat_flash", "mlp.router.classifier"),
        ("nllb-moe", "ffn.router.classifier"),
        ("llama", "attention.out_proj"),
    ],
)
def test_layers_whose_weight_is_converted_or_passed_on_stay_in_float(model_type: str, left: str) -> None:
    """LongCat's router converts its weight, NLLB-MoE's its layer; torch's attention multiplies its output itself."""
    if model_type == "llama":
        layers = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(64, 2), "fc": torch.nn.Linear(64, 64)})
        model = model_of()
        model.model.tower = layers
    else:
        model = zoo_model(next(row for row in architectures() if row.model_type == model_type))
    paths = quantizable_linears(model)
    assert not any(path.endswith(left) for path in paths), paths
    assert any(path.endswith(("fc", "down_proj", "fc2")) for path in paths)


@pytest.mark.parametrize(("model_type", "kind"), [("gemma4", "image"), ("audioflamingo3", "audio")])
def test_items_of_a_quantized_model_are_found_as_those_of_the_model(model_type: str, kind: str) -> None:
    """Gemma 4 indexes its table; rounded activations of Audio Flamingo 3 depend on what else a call computes."""
    model = tiny_media_model(next(row for row in media_rows() if row.model_type == model_type))
    example = {kind: item(model, kind)}
    (expected,) = modalities_of(model, example)
    (found,) = modalities_of(quantize(model, Quantization("8da8w", embeddings="8w")).model, example)
    assert found == expected


def test_rows_of_a_quantized_table_are_indexed_as_those_of_floats() -> None:
    table = quantize(model_of(), Quantization("8da8w", embeddings="8w")).model.get_input_embeddings().weight
    rows = table.dequantize()
    with IndexedTables():
        for index in (0, -1, (3, slice(2)), slice(1, 3), torch.tensor([2, 0])):
            assert torch.equal(table[index], rows[index])
        for index in (len(rows), -len(rows) - 1):
            with pytest.raises(IndexError):
                table[index]


@pytest.mark.parametrize(("model_type", "method"), [("aria", "encode_image"), ("gemma4", "decode")])
def test_methods_of_a_quantized_model_with_images_are_traced(model_type: str, method: str) -> None:
    """Aria's encoder reads values, by the line of code that does; Gemma 4 indexes its table in every step."""
    model = tiny_media_model(next(row for row in media_rows() if row.model_type == model_type))
    model = quantize(model, Quantization("8da8w", embeddings="8w")).model
    modalities = modalities_of(model, {"image": item(model, "image")})
    cache = ExportableCache.from_model(model, 32)
    spec = backend_for("pt2").program_spec(ProgramSpec(8, modalities=modalities), backend_for("pt2").options())
    assert Program(model, cache, spec).export(method) is not None


def test_layers_of_a_tower_that_groups_do_not_divide_stay_in_float() -> None:
    """The vision tower of Qwen 2.5 VL has rows of 3,420 weights, for which 4 bits were refused."""
    model = tiny_multimodal("qwen2_5_vl")
    mlp = model.model.visual.blocks[0].mlp
    mlp.down_proj = torch.nn.Linear(60, 32)
    path = "model.visual.blocks.0.mlp.down_proj"
    quantization = Quantization("8da4w", embeddings="8w")
    check_quantizable(model, quantization)
    grouped = quantizable_linears(model, quantization.block)
    assert path not in grouped and path in quantizable_linears(model)
    assert {"model.visual.blocks.0.mlp.up_proj", "model.language_model.layers.0.mlp.down_proj"} <= {*grouped}
    made = quantize(model, quantization)
    assert made.weights_bytes == quantized_bytes(model, quantization)
    assert type(made.model.get_submodule(path).weight) is torch.nn.Parameter
    model.model.language_model.layers[0].mlp.down_proj = torch.nn.Linear(60, 32)
    with pytest.raises(InputError, match="must divide the rows of model.language_model.layers.0.mlp.down_proj"):
        check_quantizable(model, quantization)


def test_integers_of_rows_are_not_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is quantised a few rows at a time, and their integers are freed when they are copied."""
    monkeypatch.setattr(quantize_file, "_ELEMENTS_AT_ONCE", 128)
    original, arrays = quantize_file._quantized, []

    def quantized(*args: Any) -> Any:
        # The last rows are not yet replaced by these.
        assert sum(one() is not None for one in arrays) <= 1
        found = original(*args)
        array = found.qdata.numpy().copy()
        arrays.append(weakref.ref(array))
        found.qdata = torch.from_numpy(array)
        return found

    monkeypatch.setattr(quantize_file, "_quantized", quantized)
    quantize(tiny_model("llama"), Quantization("8da8w"))
    assert len(arrays) > 50
