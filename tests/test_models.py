"""Finding and loading models, and the sentence that says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForSequenceClassification

from exportable_cache.common.tensors import parse_dtype
from exportable_cache.errors import DeviceMemoryError, InputError, UnsupportedModelError
from exportable_cache.models.loading import loading
from exportable_cache.models.loading.loading import load_config, load_model
from exportable_cache.models.loading.tokenizer import load_tokenizer
from exportable_cache.models.positions import check_positions, default_cache_len, position_limit

from .decoding.byte_tokenizer import SIZE, byte_tokenizer
from .support.models import tiny_model
from .support.multimodal import tiny_multimodal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with tokenizer and chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", vocab_size=SIZE).save_pretrained(path)
    byte_tokenizer(chat=True).save_pretrained(path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "tiny"))


def test_folder_gives_model_and_tokenizer(folder: Path) -> None:
    loaded = load_model(folder)
    assert loaded.source == "tiny"
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    original = tiny_model("llama", vocab_size=SIZE).state_dict()
    weights = loaded.model.state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer("é")["input_ids"]) == "é"
    assert loaded.tokenizer.chat_template


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_converts(folder: Path, dtype: Any) -> None:
    assert load_model(str(folder), dtype).model.dtype == torch.bfloat16


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.float16).save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half").model.dtype == torch.float16
    assert load_model(tmp_path / "half", "auto").model.dtype == torch.float16


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    load_model(folder)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    assert not recwarn.list


def test_model_is_passed_through() -> None:
    model = tiny_model("llama")
    loaded = load_model(model)
    assert loaded.model is model
    assert loaded.tokenizer is None
    assert loaded.source == "LlamaForCausalLM"
    assert load_config(model) is model.config


def test_missing_tokenizer_is_none(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert load_model(copy).tokenizer is None
    assert load_tokenizer(copy) is None


def test_config_needs_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert load_config(copy).vocab_size == SIZE


def test_progress_names_the_model(folder: Path) -> None:
    calls: list[tuple] = []
    load_model(folder, progress=lambda *call: calls.append(call))
    assert calls == [("loading tiny", 0, None)]


def refused(error: type[Exception], *parts: str, model: Any, **options: Any) -> None:
    with pytest.raises(error) as caught:
        load_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_missing_folder(tmp_path: Path) -> None:
    refused(InputError, "must be an existing folder or a hub id", "check the path", model=str(tmp_path / "nowhere"))
    refused(InputError, "must be an existing folder", model=Path("nowhere"))


def test_file_in_place_of_folder(folder: Path) -> None:
    refused(InputError, "a folder or a .gguf file", "; pass the folder with config.json", model=folder / "config.json")


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(
        InputError, "'no/such-model' is not a local folder", "hub cannot be reached (HF_HUB_OFFLINE is set)", "pass its folder",
        model="no/such-model",
    )  # fmt: skip


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # A port that nothing listens on.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(
        InputError,
        "is not a local folder",
        "not in the local hub cache",
        "hub cannot be reached",
        model="no/such-model",
    )
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("model", [3, None, torch.nn.Linear(2, 2)])
def test_other_objects(model: Any) -> None:
    refused(InputError, "model must be 'demo'", f"got {type(model).__name__}", model=model)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_unknown_model_type(copy: Path) -> None:
    edit(copy, model_type="frobnicator")
    refused(UnsupportedModelError, "'frobnicator'", "does not know", model=copy)
    with pytest.raises(UnsupportedModelError, match="'frobnicator'"):
        load_config(copy)


def test_no_causal_lm(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "vit"}))
    refused(UnsupportedModelError, "'vit' has neither a causal LM", model=copy)


def test_no_model_type(copy: Path) -> None:
    (copy / "config.json").write_text("{}")
    refused(InputError, "states no model_type", model=copy)


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    refused(InputError, "'tiny' has no readable config.json", model=copy)


def test_missing_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    refused(InputError, "'tiny'", "config.json", model=copy)


def test_classifier_is_refused_tied_or_not(tmp_path: Path) -> None:
    for tied in (False, True):
        config = tiny_model("llama", tie_word_embeddings=tied).config
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classifier")
        refused(
            UnsupportedModelError, "LlamaForSequenceClassification", "pass a causal LM", model=tmp_path / "classifier"
        )


def test_missing_tensors(copy: Path) -> None:
    edit(copy, num_hidden_layers=3)
    refused(UnsupportedModelError, "has no weights for 9 tensors of LlamaForCausalLM", "model.layers.2", model=copy)


def test_truncated_weights(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    refused(InputError, "cannot load the weights of 'tiny'", "download or save it again", model=copy)


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    refused(InputError, "cannot load the weights of 'tiny'", model=copy)


def test_damaged_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    refused(InputError, "cannot read the tokenizer of 'tiny'", "remove them to continue without it", model=copy)


def test_given_model_must_fit() -> None:
    refused(InputError, "training mode; call model.eval()", model=tiny_model("llama").train())


def test_a_given_model_of_another_dtype_is_copied() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = load_model(model, "float32").model
    assert made.dtype == made.config.dtype == torch.float32 and made.lm_head.weight is made.model.embed_tokens.weight
    assert all(torch.equal(made.state_dict()[name], tensor.float()) for name, tensor in before.items())
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_offloaded_models_are_refused_with_the_remedy() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.to("meta")
    refused(InputError, "model.layers.1.mlp.gate_proj.weight is on device meta", "device_map='cpu'", model=model)
    model = tiny_model("llama")
    model.model.layers[0]._hf_hook = object()
    refused(InputError, "model.layers.0 has a hook of accelerate", "device_map='cpu'", model=model)


@pytest.mark.parametrize("dtype", ["int64", "float33", torch.int8, 32])
def test_wrong_dtype(dtype: Any) -> None:
    with pytest.raises(InputError, match="dtype must be 'float32'.*, got "):
        parse_dtype(dtype)


# -- position tables
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "opt", "roberta"])
def test_positions_of_a_table_are_a_limit(family: str) -> None:
    """RoBERTa's first position is the one after the padding token's index, 1 here."""
    rows = {"roberta": {"max_position_embeddings": 34, "is_decoder": True, "pad_token_id": 1}}
    model = tiny_model(family, **rows.get(family, {"max_position_embeddings": 32}))
    assert default_cache_len(model.config) == 32
    check_positions(model, 32)
    for held, text in ((33, "33"), (None, "any number of")):
        with pytest.raises(InputError, match=f"at most 32 tokens, .*, got {text}; use a max_cache_len of at most 32"):
            check_positions(model, held)


def test_a_table_of_an_image_encoder_is_no_limit() -> None:
    """The encoder of DeepSeek OCR 2 has a table of queries with as many rows as its tiny decoder has positions."""
    model = tiny_multimodal("qwen2_5_vl")
    limit = position_limit(model.config)
    model.model.visual.queries = torch.nn.Embedding(limit, 4)
    check_positions(model, limit + 1)
    model.model.language_model.places = torch.nn.Embedding(limit, 4)
    with pytest.raises(InputError, match=f"at most {limit} tokens, .*places"):
        check_positions(model, limit + 1)


def test_computed_positions_are_none() -> None:
    # As many tokens in the vocabulary as positions: the token embedding is no table of positions.
    check_positions(tiny_model("llama", max_position_embeddings=128), 1000)


@pytest.mark.parametrize("open_", [load_model, load_config, load_tokenizer])
def test_empty_name_is_not_the_working_folder(folder: Path, open_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match="model must not be an empty string; pass 'demo', a local folder, or a hub id"):
        open_("")


def test_weights_that_do_not_fit_after_conversion_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would end the process without a message. Weights in their stored dtype stay in the mapped file."""
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    size = weights.stat().st_size
    # The layout of Mistral, next to that of transformers.
    (tmp_path / "model" / "consolidated.safetensors").hardlink_to(weights)
    monkeypatch.setattr(loading, "host_memory", lambda: 2 * size)
    assert load_model(tmp_path / "model", torch.float32).model.dtype == torch.float32
    monkeypatch.setattr(loading, "host_memory", lambda: 2 * size - 1)
    with pytest.raises(DeviceMemoryError, match=r"stored in bfloat16, take .* in float32, but .* are free; .*--recipe"):
        load_model(tmp_path / "model", torch.float32)
    assert load_model(tmp_path / "model", torch.bfloat16).model.dtype == torch.bfloat16
    assert load_model(tmp_path / "model").model.dtype == torch.bfloat16
