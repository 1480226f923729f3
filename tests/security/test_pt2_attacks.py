"""A `.pt2` of somebody who means harm runs nothing: each way that torch's own loader has in, and each of our own."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exportable_cache import ExportableCache
from exportable_cache.backends.pt2.archive import read_archive, write_archive
from exportable_cache.errors import BundleError
from exportable_cache.program.program import Program
from exportable_cache.program.spec import ProgramSpec

from ..support.models import tiny_model
from .archives import entries_of, rewritten, with_json


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> dict[str, bytes]:
    model = tiny_model("llama")
    program = Program(model, ExportableCache.from_model(model, 32), ProgramSpec(8))
    path = tmp_path_factory.mktemp("archive") / "program.pt2"
    write_archive(path, {name: program.export(name) for name in program.methods})
    return entries_of(path)


class _Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def _pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((_Payload(marker),), buffer)
    return buffer.getvalue()


def _sample_inputs(entries: dict, marker: Path) -> dict:
    return {**entries, "data/sample_inputs/decode.pt": _pickled(marker)}


def _pickled_weight(entries: dict, marker: Path) -> dict:
    def change(table: dict) -> None:
        described = next(iter(table["config"].values()))
        described.update(use_pickle=True, path_name="weight_999")

    entries = with_json(entries, "data/weights/decode_weights_config.json", change)
    return {**entries, "data/weights/weight_999": _pickled(marker)}


def _opaque_constant(entries: dict, marker: Path) -> dict:
    def change(table: dict) -> None:
        described = next(iter(table["config"].values()))
        described.update(use_pickle=True, path_name="opaque_obj_0", tensor_meta=None)

    entries = with_json(entries, "data/constants/decode_constants_config.json", change)
    return {**entries, "data/constants/opaque_obj_0": pickle.dumps(_Payload(marker))}


def _legacy_weights(entries: dict, marker: Path) -> dict:
    return {**entries, "data/weights/decode.pt": _pickled(marker)}


def _expression(entries: dict, marker: Path) -> dict:
    def change(stored: dict) -> None:
        values = stored["graph_module"]["graph"]["sym_int_values"]
        name = next(iter(values))
        values[name] = {"as_expr": {"expr_str": f"__import__('os').mkdir({str(marker)!r})", "hint": None}}

    return with_json(entries, "models/prefill.json", change)


def _target(target: str) -> Callable:
    def change_entries(entries: dict, marker: Path) -> dict:
        def change(stored: dict) -> None:
            node = next(node for node in stored["graph_module"]["graph"]["nodes"] if len(node["inputs"]) == 1)
            node["target"] = target
            node["inputs"] = [{"name": "", "arg": {"as_string": str(marker)}, "kind": 1}]

        return with_json(entries, "models/decode.json", change)

    return change_entries


def _code_in_a_name(entries: dict, marker: Path) -> dict:
    text = entries["models/decode.json"].decode()
    code = f"x);__import__('os').mkdir({str(marker)!r})#"
    assert '"name":"input_ids"' in text
    return {**entries, "models/decode.json": text.replace('"input_ids"', json.dumps(code)).encode()}


def _guard(entries: dict, marker: Path) -> dict:
    code = f"__import__('os').mkdir({str(marker)!r}) is None"
    return with_json(entries, "models/decode.json", lambda stored: stored.update(guards_code=[code]))


def _shared_library(entries: dict, marker: Path) -> dict:
    return {**entries, "data/aotinductor/decode/x.so": b"\x7fELF"}


_ATTACKS: dict[str, Callable] = {
    "sample inputs": _sample_inputs,
    "pickled weight": _pickled_weight,
    "opaque constant": _opaque_constant,
    "legacy weights": _legacy_weights,
    "expression": _expression,
    "os.mkdir": _target("torch.os.mkdir"),
    "hub": _target("torch.hub.load"),
    "system": _target("torch.os.system"),
    "library": _target("torch.ops.load_library"),
    "builtins": _target("_operator.__builtins__"),
    "attrgetter": _target("_operator.attrgetter"),
    "math": _target("math.__loader__.load_module"),
    "file": _target("torch.ops.aten.from_file.default"),
    "other operators": _target("torch.ops.prims.convert_element_type.default"),
    "no overload": _target("torch.ops.aten.add"),
    "not an operator": _target("torch.ops.aten.__class__.__init__"),
    "no name": _target("#export.x"),
    "storage": _target("torch.ops.aten.set_.source_Storage"),
    "code in a name": _code_in_a_name,
    "guard": _guard,
    "shared library": _shared_library,
}
#: Read as if it were not there.
_IGNORED = {"expression", "code in a name", "guard"}


@pytest.mark.parametrize("name", _ATTACKS)
def test_nothing_runs(name: str, entries: dict, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "program.pt2"
    rewritten(path, _ATTACKS[name](entries, marker))
    if name in _IGNORED:
        programs = read_archive(path)
        for program in programs.values():
            program.module(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0]))
    else:
        with pytest.raises(BundleError):
            read_archive(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["sample inputs", "pickled weight", "opaque constant", "expression"])
def test_torchs_own_loader_would_run_it(name: str, entries: dict, tmp_path: Path) -> None:
    # Or the tests above prove nothing.
    marker = tmp_path / "marker"
    path = tmp_path / "program.pt2"
    rewritten(path, _ATTACKS[name](entries, marker))
    try:
        torch.export.pt2_archive._package.load_pt2(str(path))
    except Exception:
        pass
    assert marker.exists()


def test_entries_outside_their_folder_are_refused(entries: dict, tmp_path: Path) -> None:
    for name in ("../models/decode.json", "/etc/passwd", "models/../x.json", "models/a/b.json", "code/x.py"):
        path = rewritten(tmp_path / "x.pt2", {**entries, name: b"{}"})
        with pytest.raises(BundleError, match="which no program of ours has"):
            read_archive(path)


def test_compressed_double_and_overlapping_entries_are_refused(entries: dict, tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(f"program/{name}", data)
    with pytest.raises(BundleError, match="compressed"):
        read_archive(path)
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        for name, data in [*entries.items(), ("models/decode.json", b"{}")]:
            archive.writestr(f"program/{name}", data)
    with pytest.raises(BundleError, match="which no program of ours has"):
        read_archive(path)
    rewritten(path, entries)
    with zipfile.ZipFile(path, "a") as archive:
        # The directory at the end says that two entries lie on one place.
        archive.getinfo("program/models/decode.json").header_offset = archive.getinfo(
            "program/models/prefill.json"
        ).header_offset
        archive._didModify = True
    with pytest.raises(BundleError):
        read_archive(path)


def test_a_tensor_larger_than_its_bytes_is_refused(entries: dict, tmp_path: Path) -> None:
    def change(table: dict) -> None:
        described = next(iter(table["config"].values()))
        described["tensor_meta"]["sizes"][0]["as_int"] *= 2

    path = tmp_path / "program.pt2"
    rewritten(path, with_json(entries, "data/weights/decode_weights_config.json", change))
    with pytest.raises(BundleError, match="bytes, its record has"):
        read_archive(path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b"[]", b"{}", b'{"graph_module": 1}', b""])
def test_malformed_json_is_one_sentence(text: bytes, entries: dict, tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    rewritten(path, {**entries, "models/decode.json": text})
    with pytest.raises(BundleError, match="export the model again"):
        read_archive(path)
