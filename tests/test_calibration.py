"""Calibration of 4-bit weights on a text: the gain on other text, the form that stays, and what is refused."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exportable_cache import export
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.manifest import Calibrated, Manifest, Quantized
from exportable_cache.cli.app import app
from exportable_cache.demo import demo_path
from exportable_cache.demo.task import make_question
from exportable_cache.errors import InputError, UnsupportedModelError
from exportable_cache.models.quantization.calibration import (
    Calibration,
    products_of,
    read_calibration,
    round_groups,
    round_with_feedback,
)
from exportable_cache.models.quantization.quantize import quantize
from exportable_cache.models.quantization.spec import Quantization
from exportable_cache.models.quantized_rows import is_quantized
from exportable_cache.verification.verify import verify

from .support.models import tiny_model
from .support.seq2seq import tiny_seq2seq

pytest.importorskip("torchao", reason="the executorch extra is not installed")


def questions(seed: int, count: int) -> list[str]:
    """Return questions of the demo model's task with their answers."""
    rng = random.Random(seed)
    return [one.prompt + one.answer for one in (make_question(rng) for _ in range(count))]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a file of questions."""
    path = tmp_path / "text.txt"
    path.write_text("\n".join(questions(77, 24)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_path())


@torch.no_grad()
def test_the_distance_falls_on_other_text_and_the_form_stays(text: Path, tokenizer) -> None:
    """Compare the demo model's logits of other questions, with weights rounded to nearest and calibrated."""
    model = AutoModelForCausalLM.from_pretrained(demo_path()).eval()
    ids = [tokenizer(one, return_tensors="pt").input_ids for one in questions(5, 8)]

    def logits(of: torch.nn.Module) -> torch.Tensor:
        plain = copy.deepcopy(model)
        for path, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and is_quantized(weight := of.get_submodule(path).weight):
                module.weight.data = weight.dequantize()
        return torch.cat([plain(one).logits[0] for one in ids])

    exact, calibration = logits(model), read_calibration(text, tokenizer)
    made = [quantize(model, Quantization("4w"), calibration=given) for given in (None, calibration)]
    plain, calibrated = ((logits(one.model) - exact).square().mean().sqrt() for one in made)
    assert calibrated < 0.7 * plain
    effect = calibration.effect
    assert effect is not None and effect.layers > 0 and effect.after < 0.8 * effect.before
    forms = [
        [
            (name, one.qdata.shape, one.scale.dtype, one.block_size, one.activation_quantization)
            for name, one in each.model.named_parameters()
            if is_quantized(one)
        ]
        for each in made
    ]
    assert forms[0] == forms[1] and made[0].weights_bytes == made[1].weights_bytes


def test_inputs_that_do_not_depend_on_each_other_change_no_rounding() -> None:
    """Check that there is no feedback between independent inputs, and that zeros give None."""
    weight, products = torch.randn(300, 96), torch.eye(96, dtype=torch.double)
    found = round_with_feedback(weight, 32, torch.bfloat16, True, products)
    assert found is not None
    for one, expected in zip(found, round_groups(weight, 32, torch.bfloat16, True), strict=True):
        assert torch.equal(one, expected)
    assert round_with_feedback(weight, 32, torch.bfloat16, True, 0 * products) is None


@pytest.mark.parametrize("signed", [True, False])
def test_outputs_of_dependent_inputs_come_nearer(signed: bool) -> None:
    """Check the error of outputs, in rows that are rounded together and separately."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 24, generator=generator) @ torch.randn(24, 64, generator=generator)
    weight, products = torch.randn(300, 64, generator=generator), (inputs.T @ inputs).double()
    found = round_with_feedback(weight, 32, torch.float16, signed, products)
    assert found is not None

    def error(rounded) -> torch.Tensor:
        plain = rounded.integers * rounded.scales.float().repeat_interleave(32, 1)
        return (inputs @ (plain - weight).T).square().mean()

    assert error(found) < 0.5 * error(round_groups(weight, 32, torch.float16, signed))


def test_products_are_those_of_all_tokens_and_are_measured_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the sums of one pass with those of a pass per layer, and with the inputs that a hook sees."""
    model = tiny_model("llama")
    ids = torch.randint(3, 100, (1, 5 * 16), generator=torch.Generator().manual_seed(0))
    calibration = Calibration(ids.split(16, dim=1))
    paths = [path for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    whole = dict(products_of(model, paths, calibration))
    assert whole[paths[0]] is whole[paths[1]]
    monkeypatch.setattr("exportable_cache.models.quantization.calibration._BYTES_AT_ONCE", 1)
    for path, products in products_of(model, paths, calibration):
        for one, expected in zip(products, whole[path], strict=True):
            assert torch.equal(one, expected)
    seen: list[torch.Tensor] = []
    model.get_submodule(paths[-2]).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double()))
    with torch.no_grad():
        for one in calibration.sequences:
            model(input_ids=one, use_cache=False)
    rows = torch.cat(seen[:4])
    torch.testing.assert_close(whole[paths[-2]].of_text, rows.T @ rows)
    torch.testing.assert_close(whole[paths[-2]].held_out, seen[4].T @ seen[4])


@pytest.mark.parametrize(
    ("a_token", "tokens", "pieces"),
    [(8, 16384, [65536, 131072, 262144]), (1000, 524, [65536, 131072, 262144, 524288])],
    ids=["enough", "few"],
)
def test_the_start_of_a_long_text_is_read(a_token: int, tokens: int, pieces: list[int], tmp_path: Path) -> None:
    """Check the sizes of what is tokenized of a million characters, by a tokenizer of one length of tokens."""
    path, seen = tmp_path / "text.txt", []
    path.write_text("ä" * 1_000_000, encoding="utf-8")

    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        seen.append(len(text))
        return {"input_ids": [*range(len(text) // a_token)]}

    calibration = read_calibration(path, tokenizer)
    assert torch.cat(list(calibration.sequences), dim=1).tolist() == [[*range(tokens)]] and seen == pieces


@pytest.mark.parametrize(("tokens", "last"), [(512, 128), (513, 129), (575, 191), (576, 64)])
def test_the_last_sequence_is_not_short(tokens: int, last: int, tmp_path: Path) -> None:
    """Check the lengths of sequences, because the last one of a short text is held out."""
    path = tmp_path / "text.txt"
    path.write_text("a" * tokens, encoding="utf-8")
    sequences = read_calibration(path, lambda text, verbose: {"input_ids": [*map(ord, text)]}).sequences
    lengths = [one.numel() for one in sequences]
    assert sum(lengths) == tokens and lengths[-1] == last and {*lengths[:-1]} == {128}


@torch.no_grad()
def test_layers_that_are_called_several_times_are_measured_in_each_call() -> None:
    """Compare the products of a layer in a model that loops over its layers with the inputs that a hook sees."""
    model = tiny_model("llama")
    layers = model.model.layers
    model.model.layers, model.config.num_hidden_layers = torch.nn.ModuleList([*layers, *layers]), 2 * len(layers)
    ids = torch.randint(3, 100, (1, 4 * 16), generator=torch.Generator().manual_seed(0))
    calibration, path = Calibration(ids.split(16, dim=1)), "model.layers.0.mlp.down_proj"
    ((_, found),) = products_of(model, [path], calibration)
    seen: list[torch.Tensor] = []
    model.get_submodule(path).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].double()))
    for one in calibration.sequences:
        model(input_ids=one, use_cache=False)
    assert found is not None and len(seen) == 8
    rows = torch.cat(seen[:6])
    torch.testing.assert_close(found.of_text, rows.T @ rows)


def test_a_layer_that_later_sequences_reach_first_is_measured() -> None:
    """Let a layer be called only in the second of three sequences, after the other layer of the group."""
    model = tiny_model("llama")
    up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
    calls, plain = [], model.get_submodule(down)

    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = plain

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            calls.append(rows)
            return self.expert(rows) if len(calls) == 2 else rows[..., : plain.out_features]

    model.model.layers[0].mlp.down_proj = Routed()
    ids = torch.randint(3, 100, (1, 3 * 16), generator=torch.Generator().manual_seed(0))
    found = dict(products_of(model, [up, f"{down}.expert"], Calibration(ids.split(16, dim=1))))
    assert len(calls) == 3 and found[f"{down}.expert"] is not None


def test_the_model_may_be_on_another_device() -> None:
    """Check with the meta device that ids go to the model's device and inputs of layers to the CPU."""

    class Small(torch.nn.Sequential):
        config, device = SimpleNamespace(is_encoder_decoder=False), torch.device("meta")

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            assert input_ids.device == self.device
            return super().forward(input_ids)

    model = Small(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)).to("meta")
    calibration = Calibration(torch.ones(1, 8, dtype=torch.int64).split(4, dim=1))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        dict(products_of(model, ["1"], calibration))


@pytest.mark.parametrize(
    ("quantized", "given", "message"),
    [
        (None, "text.txt", "calibrate must be None, because the weights of this bundle were not calibrated, got"),
        ({}, "text.txt", "calibrate must be None, because the weights of this bundle were not calibrated, got"),
        ({"calibration": Calibrated(tokens=600, sha256="")}, None, "must be the text of 600 tokens .* got None"),
        ({"calibration": Calibrated(tokens=600, sha256="")}, "none.txt", "must be a text file, got .*none.txt"),
    ],
    ids=["float", "plain", "missing", "no-file"],
)
def test_verify_checks_calibrate_before_the_model_is_loaded(
    quantized: dict | None, given: str | None, message: str, text: Path, tmp_path: Path
) -> None:
    """Verify with a model that does not exist, whose loading would be another error."""
    recorded = None if quantized is None else Quantized(linear="4w", group_size=32, embeddings=None, **quantized)
    bundle = Bundle(tmp_path, Manifest.model_construct(quantization=recorded, dtype="float32"))
    with pytest.raises(InputError, match=message):
        verify(bundle, tmp_path / "no-model", calibrate=None if given is None else text.with_name(given))


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ({}, b"text", "got recipe 'exact', in which a text changes no rounding; leave it out"),
        ({"quantize": "8da8w"}, b"text", "got quantize='8da8w', in which a text changes no rounding"),
        ({"quantize": "8da4w"}, None, "calibrate must be a text file, got .*; pass the path of a text"),
        ({"quantize": "8da4w"}, b"1 + 1", "calibrate must be a text of at least 512 tokens, got [0-9]+ in"),
        ({"quantize": "8da4w"}, b"\xff\xfe", "calibrate must be a text in UTF-8: cannot read"),
    ],
    ids=["recipe", "scheme", "no-file", "short", "bytes"],
)
def test_texts_and_schemes_that_do_not_fit_are_refused(
    options: dict, content: bytes | None, message: str, tmp_path: Path
) -> None:
    """Check the sentence for each input."""
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        export("demo", "executorch", 64, tmp_path / "out", calibrate=path, kernels="executorch", **options)


def test_models_without_a_tokenizer_or_with_an_encoder_are_refused(text: Path, tokenizer) -> None:
    """Check the sentences of models that a text alone does not run."""
    with pytest.raises(InputError, match="calibrate needs a tokenizer, and the model has none"):
        read_calibration(text, None)
    with pytest.raises(UnsupportedModelError, match="not supported by encoder-decoders such as T5"):
        next(products_of(tiny_seq2seq("t5"), ["lm_head"], read_calibration(text, tokenizer)))


@pytest.mark.full
def test_a_calibrated_bundle_records_the_text_and_is_verified_with_it(text: Path, tmp_path: Path) -> None:
    """Export by the command line, and verify again with the text, without it and with another."""
    pytest.importorskip("executorch")
    from typer.testing import CliRunner

    out = tmp_path / "out"
    command = ["export", "demo", "-n", "64", "--quantize", "8da4w", "-O", "kernels=executorch", "-o", str(out)]
    done = CliRunner().invoke(app, [*command, "--calibrate", str(text)])
    assert done.exit_code == 0 and "calibrated on " in done.output, done.output
    assert verify(out, "demo", calibrate=text).passed
    with pytest.raises(InputError, match="calibrate must be the text of [0-9,]+ tokens .*, got None"):
        verify(out, "demo")
    text.write_text("\n".join(questions(78, 24)), encoding="utf-8")
    with pytest.raises(InputError, match="whose tokens are others"):
        verify(out, "demo", calibrate=text)
