"""Verification of the program that the native runner executes, in a subprocess."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from exportable_cache import load
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, InputError
from exportable_cache.session.native import NotNative
from exportable_cache.verification.native_runner import NativeProcess
from exportable_cache.verification.verify import verify

from .bundle.editing import edit
from .support.native import require_native


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    monkeypatch.setenv("EXPORTABLE_CACHE_RUNTIME", "native")
    monkeypatch.delenv("EXPORTABLE_CACHE_KERNELS", raising=False)


def test_the_native_runner_is_verified(native: None, demo_bundle: Path) -> None:
    report = verify(demo_bundle, "demo", prompts=(3, 40), decode_steps=4)
    assert report.passed and report.runtime == "native" and report.steps == 10
    assert 0 < report.max_difference < report.tolerance


def test_torch_is_verified_if_chosen(demo_bundle: Path) -> None:
    report = verify(demo_bundle, "demo", prompts=(3,), decode_steps=1)
    assert report.passed and report.runtime == "torch"


def test_logits_are_those_of_the_session_at_every_position(native: None, demo_bundle: Path) -> None:
    session = load(demo_bundle)
    with NativeProcess(Bundle.open(demo_bundle)) as runner:
        for position, tokens in ((0, [5, 6, 7]), (3, [8]), (4, [9, 10]), (2, [11]), (0, [12])):
            session.rewind(int(session.length[0]) - position)
            expected = session.prefill(torch.tensor([tokens]))
            found = runner.run("forward", torch.tensor([tokens]), torch.tensor([position]))
            assert found.shape == expected.shape and (found - expected).abs().max() < 1e-4, position
        with pytest.raises(BundleError, match="outside the vocabulary"):
            runner.run("forward", torch.tensor([[10**6]]), torch.tensor([1]))


def test_a_program_that_it_refuses_has_a_reason(native: None, demo_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))

    def change(fields: dict[str, Any]) -> None:
        fields["vocab_size"], fields["logits_size"] = 99, None

    edit(folder, change)
    assert json.loads((folder / "manifest.json").read_text())["vocab_size"] == 99
    with pytest.raises(NotNative, match="99"):
        NativeProcess(Bundle.open(folder))


def test_the_choice_of_native_is_kept(native: None, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPORTABLE_CACHE_RUNNER", raising=False)
    monkeypatch.setattr("exportable_cache_runner.library.found_library", lambda: None)
    with pytest.raises(InputError, match="EXPORTABLE_CACHE_RUNTIME must not be 'native'"):
        verify(demo_bundle, "demo", prompts=(3,))
