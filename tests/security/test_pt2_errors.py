"""Programs that are not what they say: one sentence, whatever goes wrong, and no memory before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exportable_cache.backends.pt2.archive import StoredProgram, read_archive
from exportable_cache.backends.pt2.runner import ResidentRunner
from exportable_cache.bundle import signature
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
    with pytest.raises(BundleError, match="no logits"):
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_signature_that_is_a_pipe_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(bundle / signature.SIGNATURE_FILE)
    monkeypatch.setattr(signature, "fingerprint", lambda key: "x")
    with pytest.raises(BundleError, match="no regular file"):
        signature.check(bundle, b"", None)


def test_a_whole_bundle_runs(pt2_bundle: Path) -> None:
    runner, _ = Bundle.open(pt2_bundle).open_runner()
    assert runner.state
