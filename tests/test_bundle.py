"""Bundles: what the manifest records, and every way in which a folder is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.backends import TARGETS
from exportable_cache.bundle import Bundle, check_free, new_folder
from exportable_cache.errors import BundleError, InputError, MissingDependencyError
from exportable_cache.program import Method

from .decoding.byte_tokenizer import SIZE, byte_tokenizer
from .support import fake_target
from .support.models import WINDOW, tiny_model, tokens
from .support.oracle import reference_logits

CAPACITY = 64


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("gemma3_text", vocab_size=SIZE, eos_token_id=SIZE - 1)


@pytest.fixture(scope="module")
def original(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "fake", fake_target.ENTRY)
        export(model, "fake", CAPACITY, path, prefill_length=13, tokenizer=byte_tokenizer(chat=True))
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def edit(folder: Path, change: Callable[[dict], Any]) -> None:
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def refused(folder: Path, *parts: str, error: type[Exception] = BundleError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        Bundle.open(folder, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message


# -- what is recorded ---------------------------------------------------------------------------------------------------


def test_manifest_records_the_program(original: Path, model: Any) -> None:
    manifest = Bundle.open(original).manifest
    assert manifest.schema_version == 1
    assert manifest.target == "fake"
    assert manifest.source == manifest.architecture == "Gemma3ForCausalLM"
    assert manifest.model_type == "gemma3_text"
    assert manifest.vocab_size == SIZE
    assert manifest.dtype == "float32"
    assert (manifest.program.batch_size, manifest.program.max_cache_len) == (1, CAPACITY)
    methods = manifest.model_dump(mode="json")["program"]["methods"]
    assert methods["prefill"] == {
        "min_length": 2,
        "max_length": 13,
        "inputs": [
            {"name": "input_ids", "dtype": "int64", "shape": ["batch", "length"]},
            {"name": "input_pos", "dtype": "int64", "shape": ["batch"]},
        ],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", SIZE]}],
    }
    assert methods["decode"]["inputs"][0]["shape"] == ["batch", 1]
    assert manifest.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert manifest.verification is not None and manifest.verification["passed"] is True
    assert manifest.generation_config["eos_token_id"] == SIZE - 1
    assert manifest.config["sliding_window"] == WINDOW
    assert manifest.packages["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"python", "transformers", "exportable-cache"} <= manifest.packages.keys()


def test_an_interrupted_export_is_refused_even_where_it_looks_whole(original: Path, tmp_path: Path) -> None:
    left = tmp_path / ".out.abc123.partial"
    shutil.copytree(original, left)
    with pytest.raises(BundleError, match="interrupted export left; delete it"):
        Bundle.open(left)


def test_manifest_records_every_layer(original: Path) -> None:
    manifest = Bundle.open(original).manifest
    layers = manifest.model_dump(mode="json")["layers"]
    heads, dim = 2, 8
    length = {"shape": [1], "dims": ["batch_size"], "dtype": "int64", "bytes": 8}

    def kept(slots: int) -> dict:
        tensor = {"shape": [1, heads, slots, dim], "dtype": "float32", "bytes": 4 * heads * slots * dim}
        dims = ["batch_size", "num_heads", "capacity"]
        return {
            "keys": {**tensor, "dims": [*dims, "head_dim"]},
            "values": {**tensor, "dims": [*dims, "value_head_dim"]},
            "cumulative_length": length,
        }

    assert layers == [
        {
            "layer_type": "sliding_attention",
            "class": "RingLayer",
            "config": {"capacity": WINDOW, "window": WINDOW},
            "tensors": kept(WINDOW),
            "bytes": 2 * 4 * heads * WINDOW * dim + 8,
        },
        {
            "layer_type": "full_attention",
            "class": "FullLayer",
            "config": {"capacity": CAPACITY},
            "tensors": kept(CAPACITY),
            "bytes": 2 * 4 * heads * CAPACITY * dim + 8,
        },
    ]
    assert manifest.cache_bytes == sum(layer["bytes"] for layer in layers)


def test_manifest_lists_every_file_with_its_checksum(original: Path) -> None:
    manifest = Bundle.open(original).manifest
    found = {path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()} - {"manifest.json"}
    assert set(manifest.files) == found
    assert {"program.fake", "config.json", "generation_config.json", "tokenizer/tokenizer.json"} <= found
    for name, file in manifest.files.items():
        contents = (original / name).read_bytes()
        assert file.bytes == len(contents)
        assert file.sha256 == hashlib.sha256(contents).hexdigest()
    assert manifest.files["program.fake"].holds == "the name of a program"


def test_manifest_names_no_path_of_this_machine(original: Path) -> None:
    texts = [path.read_text() for path in original.rglob("*.json")]
    assert not any(str(original.parent) in text or os.path.expanduser("~") in text for text in texts)


def test_two_exports_differ_in_the_date_only(original: Path, model: Any, tmp_path: Path) -> None:
    again = export(model, "fake", CAPACITY, tmp_path / "again", prefill_length=13, tokenizer=byte_tokenizer(chat=True))
    fields = [bundle.manifest.model_dump(mode="json") for bundle in (Bundle.open(original), again)]
    assert [bool(field.pop("created")) for field in fields] == [True, True]
    assert fields[0] == fields[1]


def test_description_rebuilds_what_the_runner_needs(original: Path) -> None:
    description = Bundle.open(original).manifest.description()
    assert description.methods == {"decode": Method("decode", 1, 1), "prefill": Method("prefill", 2, 13)}
    assert description.batch_size == 1
    assert description.layers[0]["tensors"]["keys"] == {"shape": [1, 2, WINDOW, 8], "dtype": "float32"}


# -- opening ------------------------------------------------------------------------------------------------------------


def test_load_gives_a_session_that_agrees(original: Path, model: Any) -> None:
    session = load(original)
    ids = tokens(30)
    rows = [session.prefill(ids[:, :20]), *(session.decode(ids[:, position]) for position in range(20, 30))]
    torch.testing.assert_close(torch.stack(rows, dim=1), reference_logits(model, ids, 20), atol=1e-5, rtol=0)
    assert (session.target, session.batch_size, session.vocab_size, session.max_length) == ("fake", 1, SIZE, CAPACITY)


def test_load_brings_tokenizer_and_template(original: Path) -> None:
    session = load(original)
    assert session.tokenizer is not None
    pieces = list(session.generate_text([{"role": "user", "content": "é"}], 5))
    assert session.length.tolist() == [len("[user]é>".encode()) + 4]
    assert isinstance("".join(pieces), str)


def test_rewind_knows_the_layers_of_the_bundle(original: Path) -> None:
    session = load(original)
    session.prefill(tokens(30))
    session.rewind(1)
    with pytest.raises(InputError, match="at most 0 can be taken back"):
        session.rewind(1)
    with pytest.raises(InputError, match="'fake' bundle has no cache object"):
        _ = session.cache


def test_without_tokenizer_ids_work_and_text_is_refused(model: Any, tmp_path: Path) -> None:
    bundle = export(model, "fake", CAPACITY, tmp_path / "bare", verify=False)
    assert bundle.manifest.tokenizer is None
    assert not (bundle.path / "tokenizer").exists()
    session = load(bundle.path)
    assert len(list(session.generate(tokens(3), 4, stop=None))) == 4
    with pytest.raises(InputError, match="needs a tokenizer.*pass tokenizer= to Session.from_model or export"):
        session.generate_text("hi")


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder", "export a model")


def test_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    refused(folder, "is no bundle", "no manifest.json")


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_unreadable_manifest(folder: Path, contents: bytes) -> None:
    (folder / "manifest.json").write_bytes(contents)
    refused(folder, "manifest.json", "export the model again")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_schema_version(folder: Path, version: Any) -> None:
    edit(folder, lambda fields: fields.update(schema_version=version, unheard_of=1))
    refused(folder, f"schema version {version!r}, this release reads 1", "export the model again")


def test_damaged_manifest(folder: Path) -> None:
    edit(folder, lambda fields: fields["program"].pop("batch_size"))
    refused(folder, "is damaged", "program.batch_size", "export the model again")


@pytest.mark.parametrize("name", ["program.fake", "config.json", "tokenizer/tokenizer.json"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, name, "is missing")


@pytest.mark.parametrize("name", ["program.fake", "tokenizer/tokenizer.json"])
def test_truncated_file(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 1)
    refused(folder, name, f"has {size - 1} bytes, the manifest says {size}", "copy the bundle again")


def test_changed_byte(folder: Path) -> None:
    path = folder / "program.fake"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    refused(folder, "program.fake is damaged", "sha256", "copy the bundle again")
    with pytest.raises(BundleError, match="is damaged"):
        load(folder)
    assert Bundle.open(folder, check_files=False).manifest.target == "fake"


def test_other_package_version(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(torch="1.0.0+cpu"))
    refused(folder, "made with torch 1.0.0+cpu, installed is", "install torch==1.0.0", "check_versions=False")
    with pytest.raises(BundleError, match="made with torch 1.0.0"):
        load(folder)
    assert load(folder, check_versions=False).target == "fake"


def test_other_build_of_the_same_version(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(torch=torch.__version__.partition("+")[0] + "+other"))
    assert Bundle.open(folder).manifest.packages["torch"].endswith("+other")


def test_version_that_was_not_recorded(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].pop("torch"))
    refused(folder, "torch (not recorded)")


def test_packages_the_target_does_not_need_may_differ(folder: Path) -> None:
    edit(folder, lambda fields: fields["packages"].update(transformers="1.0", python="3.1"))
    Bundle.open(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "tokenizer/../../secret"])
def test_file_outside_the_folder(folder: Path, name: str) -> None:
    edit(folder, lambda fields: fields["files"].update({name: fields["files"]["config.json"]}))
    refused(folder, "is damaged", "outside the bundle")


def test_unknown_target(folder: Path) -> None:
    edit(folder, lambda fields: fields.update(target="abacus"))
    refused(folder, "unknown target 'abacus'", error=InputError)


def test_target_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TARGETS, "fake", (fake_target.__name__, ("no_such_package",), "extra"))
    refused(folder, "needs no_such_package", "exportable-cache[extra]", error=MissingDependencyError)


def test_unknown_layer_class(folder: Path) -> None:
    edit(folder, lambda fields: fields["layers"][1].update({"class": "SpiralLayer"}))
    with pytest.raises(BundleError, match="layer 1 .* is a 'SpiralLayer'.*FullLayer"):
        load(folder)


# -- folders ------------------------------------------------------------------------------------------------------------


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "new"
    with pytest.raises(RuntimeError, match="stop"), new_folder(target, overwrite=False) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError("stop")
    assert not target.exists()
    assert list(target.parent.iterdir()) == []
    with new_folder(target, overwrite=False) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
    assert (target / "file").read_text() == "whole"


def test_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with pytest.raises(BundleError, match="is never overwritten"), new_folder(target, overwrite=True):
        target.mkdir()
        (target / "precious").write_text("1")
    assert [path.name for path in target.iterdir()] == ["precious"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_only_bundles_are_overwritten(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("1")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("1")
    check_free(tmp_path / "new", overwrite=False)
    check_free(tmp_path / "empty", overwrite=False)
    check_free(folder, overwrite=True)
    with pytest.raises(BundleError, match="bundle exists; choose another folder, or overwrite it"):
        check_free(folder, overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(BundleError, match="home exists and is no bundle, so it is never overwritten"):
            check_free(tmp_path / "home", overwrite=overwrite)
        with pytest.raises(BundleError, match="file exists and is no folder"):
            check_free(tmp_path / "file", overwrite=overwrite)
        with pytest.raises(BundleError, match="cannot write .*file is no folder one may write to"):
            check_free(tmp_path / "file" / "new", overwrite=overwrite)


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link", overwrite=False) as folder:
        (folder / "file").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "1"
