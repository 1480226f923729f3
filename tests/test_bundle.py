"""Bundles: what the manifest records, and every way in which a folder is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import export, load
from exportable_cache.backends import TARGETS
from exportable_cache.bundle.builder import check_free, new_folder
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.manifest import checksum_of
from exportable_cache.cache.kernel import Kernel, PortableKernel
from exportable_cache.errors import BundleError, InputError, MissingDependencyError
from exportable_cache.program.methods import ProgramMethod
from exportable_cache.session.session import Session

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
        export(model, "fake", CAPACITY, path, prefill_chunk=13, tokenizer=byte_tokenizer(chat=True))
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def edit(folder: Path, change: Callable[[dict], Any], sign: bool = True) -> None:
    """Change the manifest and, so that what else is checked is reached, its checksum."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    if sign:
        fields["checksum"] = checksum_of(fields)
    path.write_text(json.dumps(fields))


def refused(folder: Path, *parts: str, error: type[Exception] = BundleError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        Bundle.open(folder, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message


# -- what is recorded
# ---------------------------------------------------------------------------------------------------


def test_manifest_records_the_program(original: Path, model: Any) -> None:
    manifest = Bundle.open(original).manifest
    assert manifest.schema_version == 2
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
        "read_length": None,
        "ranges": {},
        "multiple": 1,
        "scores": False,
        "grid": None,
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

    parts = {
        "storage": {"kind": "float", "dtype": "float32"},
        "kernel": {"kind": "portable"},
        "states": None,
        "indexer": None,
    }

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
            "policy": {"kind": "ring", "window": WINDOW, "rollback_slots": 0},
            **parts,
            "tensors": kept(WINDOW),
            "bytes": 2 * 4 * heads * WINDOW * dim + 8,
        },
        {
            "layer_type": "full_attention",
            "policy": {"kind": "full", "capacity": CAPACITY},
            **parts,
            "tensors": kept(CAPACITY),
            "bytes": 2 * 4 * heads * CAPACITY * dim + 8,
        },
    ]
    assert manifest.cache_bytes == sum(layer["bytes"] for layer in layers)


def test_manifest_lists_every_file_with_its_checksum(original: Path) -> None:
    manifest = Bundle.open(original).manifest
    found = {path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()} - {
        "manifest.json"
    }
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
    again = export(model, "fake", CAPACITY, tmp_path / "again", prefill_chunk=13, tokenizer=byte_tokenizer(chat=True))
    fields = [bundle.manifest.model_dump(mode="json") for bundle in (Bundle.open(original), again)]
    assert [bool(field.pop("created")) for field in fields] == [True, True]
    assert [len(field.pop("checksum")) for field in fields] == [64, 64]
    assert fields[0] == fields[1]


def test_description_rebuilds_what_the_runner_needs(original: Path) -> None:
    description = Bundle.open(original).manifest.description()
    assert description.methods == {"decode": ProgramMethod("decode", 1, 1), "prefill": ProgramMethod("prefill", 2, 13)}
    assert description.batch_size == 1
    assert description.layers[0]["tensors"]["keys"] == {"shape": [1, 2, WINDOW, 8], "dtype": "float32"}


# -- opening
# ------------------------------------------------------------------------------------------------------------


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


# -- refusals
# -----------------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder", "export a model")


def test_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    refused(folder, "is no bundle", "no manifest.json")


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"3", b"\xff\xfe"])
def test_unreadable_manifest(folder: Path, contents: bytes) -> None:
    (folder / "manifest.json").write_bytes(contents)
    refused(folder, "manifest.json", "export the model again")


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_other_schema_version(folder: Path, version: Any) -> None:
    edit(folder, lambda fields: fields.update(schema_version=version, unheard_of=1))
    refused(folder, f"schema version {version!r}, this release reads 2", "export the model again")


def test_damaged_manifest(folder: Path) -> None:
    edit(folder, lambda fields: fields["program"].pop("batch_size"))
    refused(folder, "is damaged", "program.batch_size", "export the model again")


def _inconsistent_capacity(fields: dict) -> None:
    fields["layers"][1]["policy"]["capacity"] = CAPACITY + 16


def _state_without_its_form(fields: dict) -> None:
    state = {"name": "cache.layers.0.keys", "dtype": "float32", "shape": ["batch", 2, WINDOW, 8]}
    fields["program"]["methods"]["decode"]["inputs"].append(state)


DAMAGE: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no capacity": (
        lambda fields: fields["layers"][1]["policy"].pop("capacity"),
        "layers.1: policy has none, one of kind 'full' has capacity",
    ),
    "more of a policy": (
        lambda fields: fields["layers"][1]["policy"].update(window=7),
        "layers.1: policy has capacity, window, one of kind 'full' has capacity",
    ),
    "other capacity": (
        _inconsistent_capacity,
        f"layers.1: tensors.keys.shape: capacity is {CAPACITY}, it is {CAPACITY + 16} by the policy",
    ),
    "true capacity": (
        lambda fields: fields["layers"][1]["policy"].update(capacity=True),
        "layers.1: capacity of a full policy is True; it must be an int of at least 1",
    ),
    "one tensor of another capacity": (
        lambda fields: fields["layers"][1]["tensors"]["values"]["shape"].__setitem__(2, CAPACITY + 16),
        f"layers.1: tensors.values.shape: capacity is {CAPACITY + 16}, it is {CAPACITY} by the policy or in another "
        "tensor",
    ),
    "no keys": (
        lambda fields: fields["layers"][1]["tensors"].pop("keys"),
        "layers.1: tensors: has values, cumulative_length, a layer of full has keys, values, cumulative_length",
    ),
    "other dims": (
        lambda fields: fields["layers"][1]["tensors"]["keys"]["dims"].reverse(),
        "layers.1: tensors.keys.dims: are head_dim, capacity, num_heads, batch_size, those of a layer of full are "
        "batch_size",
    ),
    "fewer dims": (
        lambda fields: fields["layers"][1]["tensors"]["keys"]["dims"].pop(),
        "layers.1.tensors.keys: shape [1, 2, 64, 8] and dims ['batch_size', 'num_heads', 'capacity'] differ in length",
    ),
    "no layers": (lambda fields: fields.update(layers=[]), "layers: List should have at least 1 item"),
    "no decode": (
        lambda fields: fields["program"]["methods"].pop("decode"),
        "program.methods: none of the methods prefill takes one token at every position",
    ),
    "empty range": (
        lambda fields: fields["program"]["methods"]["prefill"].update(min_length=14),
        "program.methods.prefill: min_length is 14, above max_length 13",
    ),
    "other form": (
        lambda fields: fields["program"].update(form="explicit"),
        "program: form is 'explicit', but method 'decode' does not take the cache as an input",
    ),
    "state without its form": (
        _state_without_its_form,
        "program: form is 'resident', but method 'decode' takes the cache as an input",
    ),
    "other batch size": (
        lambda fields: fields["program"].update(batch_size=2),
        "program.batch_size: is 2, layers.0.tensors.keys has 1 rows",
    ),
    "end token": (
        lambda fields: fields["generation_config"].update(eos_token_id="x"),
        "generation_config: eos_token_id is 'x'; it must be a token id",
    ),
    "end tokens": (
        lambda fields: fields["generation_config"].update(eos_token_id=[1, None]),
        "generation_config: eos_token_id is [1, None]; it must be a token id",
    ),
    "padding token": (
        lambda fields: fields["generation_config"].update(pad_token_id=[1]),
        "generation_config: pad_token_id is [1]; it must be a token id",
    ),
    "generation field": (
        lambda fields: fields["generation_config"].update(max_new_tokens=-1),
        "generation_config: `max_new_tokens` must be greater than 0, but is -1",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_inconsistent_manifest(folder: Path, case: str) -> None:
    change, message = DAMAGE[case]
    edit(folder, change)
    refused(folder, f"manifest.json is damaged: {message}", "; export the model again")


def test_any_other_edit_is_refused(folder: Path) -> None:
    assert Bundle.open(folder).manifest.checksum == json.loads((folder / "manifest.json").read_text())["checksum"]
    edit(folder, lambda fields: fields["program"].update(max_cache_len=CAPACITY - 1), sign=False)
    refused(folder, "is damaged: checksum: its content has sha256", "it records", "copy the bundle again, or export")
    edit(folder, lambda fields: fields.pop("checksum"), sign=False)
    refused(
        folder, "is damaged: checksum: its content has sha256", "it records none", "copy the bundle again, or export"
    )


def test_white_space_and_order_are_no_edits(folder: Path) -> None:
    path = folder / "manifest.json"
    before = Bundle.open(folder).manifest
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert Bundle.open(folder).manifest == before


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


def test_another_patch_release(folder: Path) -> None:
    major, minor = torch.__version__.split(".")[:2]
    edit(folder, lambda fields: fields["packages"].update(torch=f"{major}.{minor}.99"))
    assert Bundle.open(folder).manifest.packages["torch"].endswith(".99")
    edit(folder, lambda fields: fields["packages"].update(torch=f"{major}.{int(minor) + 1}.0"))
    refused(folder, f"made with torch {major}.{int(minor) + 1}.0", "check_versions=False")


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


def test_unknown_policy(folder: Path) -> None:
    edit(folder, lambda fields: fields["layers"][1]["policy"].update(kind="spiral"))
    refused(folder, "layers.1: policy is of kind 'spiral', known are", "full")


def test_unknown_kernel(folder: Path) -> None:
    edit(folder, lambda fields: fields["layers"][1]["kernel"].update(kind="late"))
    with pytest.raises(BundleError, match="layer 1 .* has the kernel 'late', this release has .*portable"):
        load(folder)


def test_a_layer_of_a_kernel_that_the_target_brings_is_checked_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, lambda fields: fields["layers"][1].update(kernel={"kind": "late"}, policy={"kind": "full"}))
    bundle = Bundle.open(folder)
    monkeypatch.setitem(Kernel.kinds, "late", PortableKernel)
    with pytest.raises(
        BundleError, match="is damaged: layers.1: policy has none, one of kind 'full' has capacity; export"
    ):
        Session.from_bundle(bundle)


# -- folders
# ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_where_no_folder_can_be_created() -> None:
    with pytest.raises(BundleError, match="cannot write /proc/out: .*; choose a folder one may write to"):
        check_free(Path("/proc/out"), overwrite=False)
    with pytest.raises(BundleError, match="cannot write /proc/deep/out: .*; choose a folder one may write to"):
        check_free(Path("/proc/deep/out"), overwrite=False)


def test_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot write .*a: File name too long; choose"):
        check_free(tmp_path / ("a" * 300), overwrite=False)


def test_check_leaves_no_trace(tmp_path: Path) -> None:
    check_free(tmp_path / "deep" / "new", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_can_no_longer_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("exportable_cache.bundle.builder.check_free", lambda path, overwrite: None)
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(BundleError, match="cannot write .*out: No space left on device; choose"):
        with new_folder(tmp_path / "out", overwrite=False):
            pytest.fail("the block ran")


def test_own_errors_of_the_block_pass(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine"), new_folder(tmp_path / "out", overwrite=False):
        raise OSError("mine")
    assert list(tmp_path.iterdir()) == []


def test_killed_overwrite_is_told_where_the_earlier_bundle_is(folder: Path) -> None:
    retired = folder.rename(folder.with_name(".bundle.abc123.retired"))
    refused(folder, "there is no folder", "killed while it replaced it", f"rename {retired} to it")
    retired.rename(folder)
    assert Bundle.open(folder).manifest.target == "fake"


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link", overwrite=False) as folder:
        (folder / "file").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "1"
