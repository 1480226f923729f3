"""The backend of transformers' exporters, called as their documentation calls one; and folders of other exporters."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from exportable_cache import load
from exportable_cache.cli.runtime import names_model
from exportable_cache.demo import demo_path
from exportable_cache.errors import BundleError, InputError, VerificationError

from .support.models import tiny_model

pytest.importorskip("transformers.exporters.runners", reason="this transformers takes no backends of others")

from transformers.exporters import AutoHfExporter, ExportedModel

from exportable_cache.pipeline.exporter import ExportableCacheConfig, ExportableCacheExporter

IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 11, 12]])
#: Programs of this target stay in this process, so nothing is lowered.
OPTIONS: dict[str, Any] = {"target": "fake", "max_cache_len": 64}

pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("gemma2").eval()


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, fake_backend: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved export, which was exported by transformers' auto class."""
    config = ExportableCacheConfig(**OPTIONS, tokenizer=str(demo_path()), options={"prefill_chunk": 16})
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    exported = AutoHfExporter.from_config(config).export(model, inputs, config)
    folder = tmp_path_factory.mktemp("exported")
    exported.save_pretrained(folder)
    # A second one replaces the first.
    exported.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_a_saved_export_runs_as_the_model(model: PreTrainedModel, saved: Path) -> None:
    exported = ExportedModel.from_pretrained(saved)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    for _ in range(2):
        torch.testing.assert_close(exported(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)
    assert (exported.device.type, exported.dtype) == ("cpu", torch.float32)
    assert exported.config.model_type == "gemma2"
    session = exported.runners["model"].session
    session.reset()
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :].tolist()
    assert list(session.generate(IDS, 8)) == expected
    assert session.text_tokenizer("amber")["input_ids"] == AutoTokenizer.from_pretrained(demo_path())("amber").input_ids


def test_one_component_runs_all_stages(model: PreTrainedModel) -> None:
    config = AutoHfExporter.from_config({"export_format": "exportable_cache"}).config_class(**OPTIONS)
    exported = ExportableCacheExporter().export_for_generation(model, {"input_ids": IDS}, config)
    assert list(exported.components) == ["model"] and exported.generation_config is model.generation_config
    assert len(list(exported.runners["model"].session.generate(IDS, 4))) == 4


def test_options_are_those_of_export(model: PreTrainedModel, tmp_path: Path) -> None:
    exporter = ExportableCacheExporter()
    with pytest.raises(VerificationError):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "options": {"spoil": 1.0}})
    with pytest.raises(InputError, match="image_sizes"):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "options": {"image_sizes": 3}})
    with pytest.raises(InputError, match="options must not have dry_run, output_dir, got dry_run=True"):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "options": {"output_dir": "x", "dry_run": True}})
    # A wrong option is refused before the tokenizer is loaded.
    loads = mock.patch("exportable_cache.pipeline.exporter.load_tokenizer", side_effect=AssertionError)
    with loads, pytest.raises(InputError, match="max_cache_len"):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "tokenizer": "user/name", "max_cache_len": -1})
    with pytest.raises(InputError, match="tokenizer must be a folder or hub id with a tokenizer, got "):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "tokenizer": str(tmp_path)})
    with pytest.raises(InputError, match="'no/such/folder'; check the path"):
        exporter.export(model, {"input_ids": IDS}, {**OPTIONS, "tokenizer": "no/such/folder"})
    for inputs, found in (
        ({"input_ids": IDS, "pixel_values": torch.zeros(1, 3, 8, 8)}, "pixel_values"),
        ({"input_ids": IDS[0]}, "input_ids"),
        ({}, "none"),
    ):
        with pytest.raises(InputError, match=rf"with input_ids \[batch, length\], got {found};"):
            exporter.export(model, inputs, OPTIONS)
    # As transformers documents a step's inputs; the cache is replaced.
    inputs = {"input_ids": IDS.expand(2, -1), "past_key_values": DynamicCache(), "use_cache": True}
    rows = exporter.export(model, inputs, OPTIONS)
    assert rows.runners["model"].session.batch_size == 2
    with pytest.raises(InputError, match="batch_size must be 1 for calling an export, got 2"):
        rows(input_ids=IDS.expand(2, -1))


def test_a_call_takes_one_sequence_without_padding(saved: Path) -> None:
    exported = ExportedModel.from_pretrained(saved)
    positions = torch.arange(IDS.shape[1])[None]
    expected = exported(input_ids=IDS).logits
    given = {"attention_mask": torch.ones_like(IDS).bool(), "position_ids": positions}
    torch.testing.assert_close(exported(input_ids=IDS, **given).logits, expected, atol=0, rtol=0)
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    for inputs, message in (
        ({}, "a call must have input_ids and no other input than .*, got none; call it with input_ids=ids"),
        ({"attention_mask": mask}, "a call must have input_ids .*, got attention_mask;"),
        ({"input_ids": IDS.expand(2, -1)}, "input_ids must have 1 rows, got 2"),
        ({"input_ids": IDS[0]}, r"input_ids must have shape \[batch, length\]"),
        ({"input_ids": IDS[:, :0]}, "input_ids must have at least one token"),
        ({"input_ids": IDS.tolist()}, "input_ids must be an int64 tensor .*, got a list"),
        ({"input_ids": IDS, "attention_mask": mask}, "attention_mask must be all ones, .*, got other values"),
        ({"input_ids": IDS, "attention_mask": mask[:, 1:]}, r"attention_mask must be all ones.*\[1, 11\]"),
        ({"input_ids": IDS, "attention_mask": [[1]]}, "attention_mask must be all ones, .*, got list"),
        ({"input_ids": IDS, "position_ids": positions + 1}, r"position_ids must be 0, 1, 2, .*, got other values"),
    ):
        with pytest.raises(InputError, match=message):
            exported(**inputs)
    with pytest.raises(InputError, match="got inputs_embeds; call it with input_ids=ids"):
        exported.runners["model"](inputs_embeds=torch.zeros(1, 2, 8))


def compressed(kind: int, size: int | None = None) -> Callable[[Path], None]:
    """Return a function that compresses a .zip file, and claims that its first file has `size` bytes."""

    def compress(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        with zipfile.ZipFile(path, "w", kind) as archive:
            for name, content in files.items():
                # So that the sum of the claimed sizes is less than the size of the file.
                archive.writestr(name, content if size is None else content[:20])
        if size is not None:
            data = bytearray(path.read_bytes())
            for start in (22, data.index(b"PK\x01\x02") + 24):
                data[start : start + 4] = size.to_bytes(4, "little")
            path.write_bytes(data)

    return compress


def claim_a_whole_file(path: Path) -> None:
    """Write one file that claims to be as long as the .zip file around it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02") + 20
    data[start : start + 8] = len(data).to_bytes(4, "little") * 2
    path.write_bytes(data)


def add_outside(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../outside", "a file of a stranger")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot be unpacked"),
        (lambda path: path.write_bytes(b"text"), "cannot be unpacked"),
        (compressed(zipfile.ZIP_DEFLATED), "without compression"),
        # bz2 and LZMA expand a whole block, however small the file claims to be.
        (compressed(zipfile.ZIP_BZIP2, 10), "without compression"),
        (compressed(zipfile.ZIP_LZMA, 10), "without compression"),
        (claim_a_whole_file, "cannot be unpacked"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"manifest", b"\0anifest")), "cannot be unpacked"),
        (add_outside, None),
    ],
)
def test_a_spoiled_file_is_refused(
    spoil: Callable[[Path], Any], message: str | None, saved: Path, tmp_path: Path
) -> None:
    copied = tmp_path / "a" / "b" / "copy"
    copied.mkdir(parents=True)
    for file in saved.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    spoil(copied / "model.bundle.zip")
    if message is None:
        # Unpacked within the folder of the bundle, where a file that the manifest does not list is ignored.
        ExportedModel.from_pretrained(copied)
        assert not list(tmp_path.rglob("outside"))
        return
    with pytest.raises(BundleError, match=message):
        ExportedModel.from_pretrained(copied)


def test_exports_of_others_are_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, content, message in (
        ("model.pte", "", "has the program model.pte of another exporter, and no manifest.json"),
        ("export.json", json.dumps({"export_format": "onnx"}), "transformers in the format 'onnx': its programs get"),
        ("export.json", "[" * 100_000, "an export of transformers in the format 'None'"),
        ("export.json", (saved / "export.json").read_text(), "open it with ExportedModel.from_pretrained"),
    ):
        (tmp_path / name).write_text(content)
        for opens, kind in ((load, BundleError), (names_model, InputError)):
            with pytest.raises(kind, match=message):
                opens(str(tmp_path))
    # An export can lie next to the model's weights.
    (tmp_path / "model.safetensors").touch()
    assert names_model(str(tmp_path))


def test_transformers_documents_no_other_cache_implementations(model: PreTrainedModel) -> None:
    """`cache_implementation` has a fixed list, so our cache is passed as `past_key_values`."""
    with warnings.catch_warnings(), pytest.raises(ValueError, match="cache_implementation"):
        warnings.simplefilter("ignore")
        model.generate(IDS, cache_implementation="exportable", max_new_tokens=1)
