"""What the manifest of a bundle records, and what opening it gives back."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import exportable_cache
from exportable_cache import export, load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, InputError
from exportable_cache.program.methods import ProgramMethod

from ..decoding.byte_tokenizer import SIZE, byte_tokenizer
from ..support.forked import run_python
from ..support.models import WINDOW, tokens
from ..support.oracle import reference_logits
from .editing import CAPACITY


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
        "scored_tokens": 0,
        "grid": None,
        "item": None,
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
    with pytest.raises(BundleError, match="interrupted export; delete it"):
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


def test_load_gives_a_session_that_agrees(original: Path, model: Any) -> None:
    session = load(original)
    ids = tokens(30)
    rows = [session.prefill(ids[:, :20]), *(session.decode(ids[:, position]) for position in range(20, 30))]
    torch.testing.assert_close(torch.stack(rows, dim=1), reference_logits(model, ids, 20), atol=1e-5, rtol=0)
    assert (session.target, session.batch_size, session.vocab_size, session.max_length) == ("fake", 1, SIZE, CAPACITY)


def test_load_brings_tokenizer_and_template(original: Path) -> None:
    session = load(original)
    assert session.tokenizer is not None
    pieces = list(session.stream_text([{"role": "user", "content": "é"}], 5))
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
        session.stream_text("hi")


@pytest.mark.parametrize("target", ["executorch", "tensorrt"])
def test_a_process_that_only_opens_knows_every_kernel_of_the_target(target: str) -> None:
    """The exporter imports more, so that a bundle opened where it was made hides what is missing."""
    pytest.importorskip("executorch" if target == "executorch" else "torch")
    sources = (Path(exportable_cache.__file__).parent / "backends" / target).rglob("*.py")
    made = {
        kind for path in sources for kind in re.findall(r'Layout, kind="(\w+)"\)', path.read_text(encoding="utf-8"))
    }
    code = (
        "from exportable_cache.backends.registry import backend_for\n"
        "from exportable_cache.cache.layout import Layout\n"
        f"backend_for({target!r})\nprint(*Layout.kinds)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert made and made <= set(done.stdout.split())
