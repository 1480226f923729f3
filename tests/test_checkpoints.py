"""Checkpoints as people have them: sharded, tied, quantised already, GGUF files, tokenizers of sentencepiece."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

from exportable_cache import export, load
from exportable_cache.errors import InputError, MissingDependencyError, UnsupportedModelError
from exportable_cache.models.loading import prequantized
from exportable_cache.models.loading.loading import load_config, load_model
from exportable_cache.models.loading.location import locate
from exportable_cache.models.loading.tokenizer import eos_tokens_of, load_tokenizer
from exportable_cache.pipeline.plan import plan

from .support import checkpoints
from .support.models import tiny_model, tokens

CAPACITY = 48


pytestmark = pytest.mark.usefixtures("fake_backend")


def weight_gap(left: PreTrainedModel, right: PreTrainedModel) -> float:
    """Largest difference of two weights, as a share of the largest weight."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# -- files of a float model


def test_shards_are_put_together(tmp_path: Path) -> None:
    model, folder = tiny_model("llama"), tmp_path / "sharded"
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2 and weight_gap(load_model(folder).model, model) == 0
    shards[1].unlink()
    with pytest.raises(InputError, match="cannot load the weights of 'sharded'.*download or save it again"):
        load_model(folder)


def test_tied_tables_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    loaded = load_model(tmp_path / "tied", "float32").model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and weight_gap(loaded, model) == 0


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_stored_dtype_has_an_old_name_and_a_new_one(field: str, tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**fields, field: "bfloat16"}))
    assert plan(tmp_path, CAPACITY).dtype == "bfloat16"
    assert load_model(tmp_path).model.dtype == torch.bfloat16


def test_a_generation_config_without_an_end_token_generates_to_the_limit(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    assert "eos_token_id" not in json.loads((tmp_path / "model" / "generation_config.json").read_text())
    session = load(export(tmp_path / "model", "fake", CAPACITY, tmp_path / "out").path)
    assert len(list(session.generate(tokens(5), 7))) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"eos_token_id": 2, "do_',
            "cannot read generation_config.json of 'model': .*download it again, or remove it",
        ),
        ("[1]", r"generation_config.json of 'model' must be a JSON object, got \[1\]; correct it, or remove it"),
        ('{"max_new_tokens": -3}', "cannot read generation_config.json of 'model': .*max_new_tokens.*correct it"),
        ('{"eos_token_id": "x"}', "eos_token_id .* must be token ids from 0 to 127, got 'x'; correct"),
        ('{"eos_token_id": [2, 99999]}', "eos_token_id .* must be token ids from 0 to 127, got 99999; correct"),
        ('{"eos_token_id": -7}', "eos_token_id .* must be token ids from 0 to 127, got -7; correct"),
        ('{"suppress_tokens": ["x"]}', r"suppress_tokens .* must be a list of token ids, got \['x'\]; correct"),
        ('{"suppress_tokens": 3}', "cannot read generation_config.json of 'model': suppress_tokens: .*; correct it"),
    ],
)
def test_a_generation_config_that_cannot_be_followed_is_refused(text: str, message: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        export(tmp_path / "model", "fake", CAPACITY, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_end_of_the_config_counts_where_the_generation_config_has_none(tmp_path: Path) -> None:
    tiny_model("llama", eos_token_id=5).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    assert load_model(tmp_path / "model").model.generation_config.eos_token_id == 5
    checkpoints.edit_config(tmp_path / "model", eos_token_id=None, text_config={"eos_token_id": [6, 7]})
    assert eos_tokens_of(locate(tmp_path / "model"), GenerationConfig()) == [6, 7]
    checkpoints.edit_config(tmp_path / "model", eos_token_id=5, text_config=None)
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert load_model(tmp_path / "model").model.generation_config.eos_token_id == 3


def test_sentencepiece_alone_is_a_tokenizer(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text("\n".join(f"the code of amber is {index}, the quiet farmer slept" for index in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=100, model_type="bpe", minloglevel=2
    )
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    said, theirs = "the code of amber is 12", sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    bundle = export(tmp_path, "fake", CAPACITY, tmp_path / "out")
    for tokenizer in (load_tokenizer(tmp_path), bundle.tokenizer()):
        assert tokenizer(said, add_special_tokens=False)["input_ids"] == theirs.encode(said)
    # Without its class transformers reads the same file, and cuts otherwise.
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="while sentencepiece splits it into.*add its tokenizer_config.json"):
        load_tokenizer(tmp_path)


# -- weights that are quantised already


def needs(*modules: str) -> list[pytest.MarkDecorator]:
    missing = [name for name in modules if util.find_spec(name) is None]
    return [pytest.mark.skip(reason=f"{', '.join(missing)} not installed")] if missing else []


def written(write: Callable[..., PreTrainedModel], *arguments: Any, modules: tuple[str, ...]) -> Any:
    name = "-".join([write.__name__.removeprefix("write_"), *map(str, arguments)])
    return pytest.param(write, arguments, id=name, marks=needs(*modules))


#: The most that rounding costs, half a step between two numbers that a weight can be, as a share of the largest one.
STEP = {
    "torchao-4": 1 / 13, "torchao-8": 1 / 250, "bitsandbytes-4": 0.16, "bitsandbytes-8": 1 / 200, "fp8": 1 / 28,
    "mxfp4": 1e-6,
}  # fmt: skip
SAYS = {
    "torchao-4": "(torchao, 4 bits in groups of 32)",
    "torchao-8": "(torchao, 8 bits)",
    "bitsandbytes-4": "(bitsandbytes, 4 bits)",
    "bitsandbytes-8": "(bitsandbytes, 8 bits)",
    "fp8": "(fp8, 8 bits)",
    "mxfp4": "(mxfp4, 4 bits in groups of 32)",
}
QUANTISED = [
    written(checkpoints.write_torchao, 4, modules=("torchao",)),
    written(checkpoints.write_torchao, 8, modules=("torchao",)),
    written(checkpoints.write_bitsandbytes, 4, modules=("bitsandbytes", "accelerate")),
    written(checkpoints.write_bitsandbytes, 8, modules=("bitsandbytes", "accelerate")),
    written(checkpoints.write_fp8, modules=("accelerate",)),
    written(checkpoints.write_mxfp4, modules=()),
]


@pytest.mark.parametrize(("write", "arguments"), QUANTISED)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantised_weights_are_read_as_plain_ones(
    write: Callable[..., PreTrainedModel],
    arguments: tuple[Any, ...],
    dtype: str | None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id.removeprefix("None-").removeprefix("bfloat16-")
    before = write(tmp_path / "model", *arguments)
    loaded = load_model(tmp_path / "model", dtype)
    model = loaded.model
    assert all(type(one.data) is torch.Tensor and one.dtype == model.dtype for one in model.parameters())
    assert {type(module).__module__.split(".")[0] for module in model.modules()} <= {"torch", "transformers"}
    assert getattr(model.config, "quantization_config", None) is None
    assert model.dtype == (torch.float32 if dtype is None else torch.bfloat16)
    rounding = 0 if dtype is None else 2**-8
    # What is left after rounding, and that something was rounded.
    assert (0 if name == "mxfp4" else STEP[name] / 8) <= weight_gap(model.float(), before) <= STEP[name] + rounding
    (remark,) = loaded.remarks
    assert remark.startswith(f"weights are stored quantised {SAYS[name]} and were")


@pytest.mark.parametrize(("write", "arguments"), [one for one in QUANTISED if one.id in ("torchao-4", "mxfp4")])
def test_quantised_checkpoints_are_exported_and_say_so(
    write: Callable[..., PreTrainedModel], arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    write(tmp_path / "model", *arguments)
    assert plan(tmp_path / "model", CAPACITY).refusal is None
    lines: list[str] = []
    bundle = export(
        tmp_path / "model", "fake", CAPACITY, tmp_path / "out", progress=lambda line, *_: lines.append(line)
    )
    (remark,) = bundle.manifest.remarks
    nearest = "the nearest option is quantize='8da4w' with group_size=32"
    kept = "quantize='keep' (--quantize keep) stores their integers where the target has the form"
    assert remark.endswith(f"were dequantised; {kept if write is checkpoints.write_torchao else nearest}")
    assert remark in lines
    assert "quantization_config" not in bundle.manifest.config
    assert len(list(load(bundle.path).generate(tokens(5), 4))) > 0


@pytest.mark.parametrize(
    ("quantization", "error", "words"),
    [
        (
            {"quant_method": "hqq", "bits": 4},
            UnsupportedModelError,
            "'model' are quantised .hqq, 4 bits., which is not",
        ),
        (
            {"quant_method": "of-tomorrow"},
            UnsupportedModelError,
            "of-tomorrow.*pass the original checkpoint",
        ),
        ({"load_in_4bit": True}, MissingDependencyError, "needs bitsandbytes and accelerate; pip install .*quantized"),
        ({"quant_method": "torchao"}, MissingDependencyError, "reading them needs torchao; pip install .*executorch"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_weights(
    quantization: dict[str, Any],
    error: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    checkpoints.edit_config(folder, quantization_config=quantization)
    # No weights: whoever reads them fails otherwise.
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(prequantized.util, "find_spec", lambda name: None)
    for call in (lambda: load_model(folder), lambda: export(folder, "fake", CAPACITY, tmp_path / "out")):
        with pytest.raises(error, match=words):
            call()
    assert load_config(folder).model_type == "llama" and not (tmp_path / "out").exists()


def test_float8_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    """transformers reads their values without the scales, in silence. ModelOpt's config may be in a file of its own."""
    model, file = tiny_model("llama"), tmp_path / "hf_quant_config.json"
    model.save_pretrained(tmp_path)
    tensors = dict(model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    tensors |= {name: (tensors[name] * 448).to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(1 / 448)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"has 1 scales of weights, such as {name}_scale, but its config"):
        load_model(tmp_path)
    # The config of keys and values alone, and that of weights.
    for fields, stored in (({"kv_cache_quant_algo": "FP8"}, None), ({"quant_algo": "FP8"}, "modelopt, 8 bits")):
        file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
        found = prequantized.stored_quantization(load_config(tmp_path))
        assert (None if found is None else str(found)) == stored
    assert weight_gap(load_model(tmp_path).model, model) < 2**-4
    file.write_text("[")
    with pytest.raises(InputError, match="cannot read hf_quant_config.json"):
        load_config(tmp_path)


def test_a_live_quantised_model_is_refused_with_the_remedy() -> None:
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(
        UnsupportedModelError, match=r"must not be quantised, got mxfp4.*pass its folder.*or model.dequantize\(\)"
    ):
        load_model(model)


# -- GGUF


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, checkpoints.write_gguf(path)


def test_a_gguf_file_is_a_model_with_its_tokenizer(gguf_file: tuple[Path, PreTrainedModel]) -> None:
    path, before = gguf_file
    loaded = load_model(path)
    assert (loaded.source, loaded.model.dtype) == ("tiny.gguf", torch.float32)
    # Q8_0: blocks of 32 weights, 127 steps either side.
    assert 1e-4 < weight_gap(loaded.model, before) <= 1 / 254 + 2**-10
    assert loaded.tokenizer("amber")["input_ids"] == [
        1,
        *(3 + " abcdefghijklmnopqrstuvwxyz".index(c) for c in " amber"),
    ]
    assert loaded.tokenizer.eos_token_id == 2
    assert load_tokenizer(path).eos_token_id == 2
    assert plan(path, CAPACITY).cache_bytes == plan(before, CAPACITY).cache_bytes


def test_a_gguf_file_is_exported(gguf_file: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    bundle = export(str(gguf_file[0]), "fake", CAPACITY, tmp_path / "out")
    assert bundle.manifest.source == "tiny.gguf"
    (remark,) = bundle.manifest.remarks
    assert remark.startswith("weights of tiny.gguf were dequantised; quantize='keep'")
    assert "quantization_config" not in bundle.manifest.config
    assert bundle.tokenizer().eos_token_id == 2


def test_a_gguf_file_ends_at_the_end_of_a_turn_too(gguf_file: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    assert load_model(gguf_file[0]).model.generation_config.eos_token_id == 2
    # By the field, and where there is none by its text, as llama.cpp knows it.
    checkpoints.write_gguf(tmp_path / "field.gguf", end_of_turn=40)
    checkpoints.write_gguf(tmp_path / "text.gguf", control={50: "<|im_end|>", 51: "<|im_start|>"})
    for name, ends in (("field", [2, 40]), ("text", [2, 50])):
        bundle = export(tmp_path / f"{name}.gguf", "fake", CAPACITY, tmp_path / name)
        assert bundle.manifest.generation_config["eos_token_id"] == ends


def test_a_gguf_file_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"'tiny.gguf' .* needs gguf and accelerate; pip install .*\[gguf\]"
    ):
        load_model(tmp_path / "tiny.gguf")


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="cannot read 'tiny.gguf'.*pass the original checkpoint"):
        load_model(tmp_path / "tiny.gguf")
