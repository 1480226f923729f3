"""Programs that are not what they say: one sentence, whatever goes wrong, and no memory before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportable_cache.backends.pt2.archive import StoredProgram, read_archive
from exportable_cache.backends.pt2.target import ResidentRunner
from exportable_cache.bundle import signing
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError

from .archives import entries_of, rewritten, with_json


def _runner(function: Callable) -> ResidentRunner:
    description = SimpleNamespace(methods={"decode": SimpleNamespace(is_step=True)}, batch_size=1, layers=[])
    return ResidentRunner({"decode": StoredProgram(function, {}, {})}, description)


@pytest.mark.parametrize(
    "error", [OverflowError, ZeroDivisionError, AssertionError, MemoryError, KeyError, IndexError, RuntimeError]
)
def test_errors_of_a_program_are_one_sentence(error: type[Exception]) -> None:
    def fail() -> None:
        raise error("x")

    with pytest.raises(BundleError, match="failed"):
        _runner(fail).run("decode")


@pytest.mark.parametrize(
    "outputs", [(), (3,), (torch.zeros(5),), (torch.zeros(1, 5, dtype=torch.int64),), (torch.zeros(2, 5),)]
)
def test_what_is_no_logits_is_refused(outputs: tuple) -> None:
    with pytest.raises(BundleError, match="(must return|returns no) logits"):
        _runner(lambda: outputs).run("decode")


def test_state_is_declared_and_has_a_limit(pt2_bundle: Path, tmp_path: Path) -> None:
    entries = entries_of(pt2_bundle / "program.pt2")
    with pytest.raises(BundleError, match="does not list|manifest does not"):
        read_archive(pt2_bundle / "program.pt2", declared=())

    def change(table: dict) -> None:
        described = next(value for name, value in table["config"].items() if name.startswith("layers_"))
        meta = described["tensor_meta"]
        # By its strides it spans one element.
        meta["sizes"] = [{"as_int": 1 << 30}] * 2
        meta["strides"] = [{"as_int": 0}] * 2

    path = rewritten(tmp_path / "x.pt2", with_json(entries, "data/constants/decode_constants_config.json", change))
    with pytest.raises(BundleError, match="bytes, its record has"):
        read_archive(path)


def _with_node(entries: dict, target: str, **inputs: dict) -> dict:
    """The entries with a node before the others of `decode`, that takes its first token."""

    def change(stored: dict) -> None:
        graph = stored["graph_module"]["graph"]
        token = next(value for value in graph["inputs"] if value["as_tensor"]["name"] == "input_ids")
        given = [{"name": name, "arg": value, "kind": 1} for name, value in {"self": token, **inputs}.items()]
        outputs = [{"as_tensor": {"name": "more"}}]
        graph["nodes"].insert(
            0, {"target": f"torch.ops.aten.{target}", "inputs": given, "outputs": outputs, "metadata": {}}
        )

    return with_json(entries, "models/decode.json", change)


@pytest.mark.parametrize(
    ("target", "name", "value", "wanted"),
    [
        ("to.dtype", "dtype", {"as_int": 200}, "ScalarType"),
        ("to.dtype", "dtype", {"as_sym_int": {"as_name": "input_ids"}}, "ScalarType"),
        ("contiguous.default", "memory_format", {"as_int": 4}, "MemoryFormat"),
        ("zeros_like.default", "layout", {"as_int": 0}, "Layout"),
        ("zeros_like.default", "dtype", {"as_optional_tensor": {"as_tensor": {"name": "input_ids"}}}, "ScalarType"),
        ("sum.dim_IntList", "dim", {"as_floats": [1.0]}, "List.int"),
        ("unsqueeze.default", "dim", {"as_float": 1.0}, "int"),
        ("softmax.int", "dim", {"as_none": True}, "int"),
        ("clamp.default", "min", {"as_string": "x"}, "number"),
        ("clone.default", "memory_format", {"as_device": {"type": "cpu", "index": None}}, "MemoryFormat"),
    ],
)
def test_values_are_of_the_kind_that_the_operator_declares(
    pt2_bundle: Path, tmp_path: Path, target: str, name: str, value: dict, wanted: str
) -> None:
    entries = _with_node(entries_of(pt2_bundle / "program.pt2"), target, **{name: value})
    with pytest.raises(
        BundleError, match=rf"{name} of aten.{target} must be \S*{wanted}\S*, got '{next(iter(value))}'"
    ):
        read_archive(rewritten(tmp_path / "x.pt2", entries))


@pytest.mark.parametrize("value", [{"as_int": 2**63}, {"as_ints": [0, -(2**63) - 1]}])
def test_numbers_fit_in_64_bits(pt2_bundle: Path, tmp_path: Path, value: dict) -> None:
    entries = _with_node(entries_of(pt2_bundle / "program.pt2"), "sum.dim_IntList", dim=value)
    with pytest.raises(BundleError, match="does not fit in 64 bits"):
        read_archive(rewritten(tmp_path / "x.pt2", entries))


def test_bools_are_0_or_1_and_views_have_a_limit(pt2_bundle: Path, tmp_path: Path) -> None:
    """A kernel that counts a bool of 255 as 255 elements writes past its result."""
    entries = entries_of(pt2_bundle / "program.pt2")
    table = "data/weights/decode_weights_config.json"

    def of(dtype: int, sizes: list[int], strides: list[int]) -> Callable[[dict], None]:
        def change(table: dict) -> None:
            described = next(iter(table["config"].values()))
            described["path_name"] = "weight_9999"
            described["tensor_meta"].update(
                dtype=dtype,
                sizes=[{"as_int": size} for size in sizes],
                strides=[{"as_int": stride} for stride in strides],
            )

        return change

    path = tmp_path / "x.pt2"
    for data, good in ((b"\x00\x01", True), (b"\x00\xff", False)):
        changed = {**with_json(entries, table, of(12, [2], [1])), "data/weights/weight_9999": data}
        rewritten(path, changed)
        if good:
            read_archive(path)
        else:
            with pytest.raises(BundleError, match="must have bytes of 0 and 1, got 255"):
                read_archive(path)
    changed = {**with_json(entries, table, of(7, [1 << 20] * 2, [0, 0])), "data/weights/weight_9999": b"\x00" * 4}
    with pytest.raises(BundleError, match="must have at most 4294967296"):
        read_archive(rewritten(path, changed))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_signature_that_is_a_pipe_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(bundle / signing.SIGNATURE_FILE)
    monkeypatch.setattr(signing, "fingerprint", lambda key: "x")
    with pytest.raises(BundleError, match="not a regular file"):
        signing.check(bundle, b"", None)


def test_a_whole_bundle_runs(pt2_bundle: Path) -> None:
    runner, _ = Bundle.open(pt2_bundle).open_runner()
    assert runner.state
