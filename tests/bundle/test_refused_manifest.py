"""Every way in which a manifest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import checksum_of

from ..support.models import WINDOW
from .editing import CAPACITY, edit, refused


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no folder", "export a model")
    (tmp_path / "engine.plan").write_bytes(b"a plan")
    refused(tmp_path / "engine.plan", "must be a folder, got the file", "pass the folder that export wrote")


def test_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    refused(folder, "is not a bundle", "no manifest.json")


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "cannot read"),
        (b"{", "cannot read"),
        (b"\xff\xfe", "cannot read"),
        (b"[]", "it must hold a JSON object"),
        (b"3", "it must hold a JSON object"),
    ],
)
def test_unreadable_manifest(folder: Path, contents: bytes, said: str) -> None:
    (folder / "manifest.json").write_bytes(contents)
    refused(folder, "manifest.json", said, "export the model again")


@pytest.mark.parametrize("place", ["dtype", "source"])
def test_half_a_character(folder: Path, place: str) -> None:
    """No file name and no message can have it."""
    edit(folder, lambda fields: fields.update({place: "\ud800"}))
    refused(folder, "cannot read", "surrogates not allowed", "export the model again")


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


POSITIONS_INPUT = {"name": "input_pos", "dtype": "int64", "shape": ["batch"]}
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
        "layers.1: tensors.keys.dims: must be batch_size, num_heads, capacity, head_dim for a full layer, got head_dim",
    ),
    "fewer dims": (
        lambda fields: fields["layers"][1]["tensors"]["keys"]["dims"].pop(),
        "layers.1.tensors.keys: shape [1, 2, 64, 8] and dims ['batch_size', 'num_heads', 'capacity'] differ in length",
    ),
    "no layers": (lambda fields: fields.update(layers=[]), "layers: List should have at least 1 item"),
    "no decode": (
        lambda fields: fields["program"]["methods"].pop("decode"),
        "program.methods: one of the methods must take one token at every position, got prefill",
    ),
    "empty range": (
        lambda fields: fields["program"]["methods"]["prefill"].update(min_length=14),
        "program.methods.prefill: min_length must be at most max_length 13, got 14",
    ),
    "ids without lengths": (
        lambda fields: fields["program"]["methods"]["decode"]["inputs"][0]["shape"].append("length"),
        "program.methods.decode: input 'input_ids' must have the shape batch, length and at most a number of codebooks",
    ),
    "an input twice": (
        lambda fields: fields["program"]["methods"]["decode"]["inputs"].append(POSITIONS_INPUT),
        "program.methods.decode: inputs must have different names, got 'input_pos' twice",
    ),
    "inputs in another order": (
        lambda fields: fields["program"]["methods"]["decode"]["inputs"].reverse(),
        "program.methods.decode: a step's second input must be 'input_pos', got input_ids",
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
        "program.batch_size: is 2, but layers.0.tensors.keys has 1 rows",
    ),
    "end token": (
        lambda fields: fields["generation_config"].update(eos_token_id="x"),
        "generation_config: eos_token_id must be a token id, got 'x'",
    ),
    "end tokens": (
        lambda fields: fields["generation_config"].update(eos_token_id=[1, None]),
        "generation_config: eos_token_id must be a token id, got [1, None]",
    ),
    "padding token": (
        lambda fields: fields["generation_config"].update(pad_token_id=[1]),
        "generation_config: pad_token_id must be a token id, got [1]",
    ),
    "a long name": (
        lambda fields: fields["files"].update({"x" * 5000: {"sha256": "0", "bytes": 0, "holds": "x"}}),
        f"files: file '{'x' * 64}'... must have a name of printable characters, at most 255 bytes",
    ),
    "a name that ends early": (
        lambda fields: fields["files"].update({"program\0.pt2": {"sha256": "0", "bytes": 0, "holds": "x"}}),
        "files: file 'program\\x00.pt2'... must have a name of printable characters",
    ),
    "a dtype of no kind": (
        lambda fields: fields["layers"][1]["tensors"]["keys"].update(dtype="nn"),
        "layers.1.tensors.keys.dtype: must be the name of a dtype of torch, got 'nn'",
    ),
    "bytes past 64 bits": (
        lambda fields: fields.update(cache_bytes=2**63),
        "cache_bytes: Input should be less than 9223372036854775808",
    ),
    "a negative size": (
        lambda fields: fields["layers"][1]["tensors"]["keys"]["shape"].__setitem__(1, -2),
        "layers.1.tensors.keys.shape.1: Input should be greater than or equal to 0",
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


def test_the_checksum_depends_on_every_field(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    found = {checksum_of({**fields, name: "changed"}) for name in fields if name != "checksum"}
    assert len(found) == len(fields) - 1 and fields["checksum"] not in found


def test_white_space_and_order_are_no_edits(folder: Path) -> None:
    path = folder / "manifest.json"
    before = Bundle.open(folder).manifest
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert Bundle.open(folder).manifest == before
