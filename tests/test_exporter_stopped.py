"""An export that fails, is refused by its verification or is killed: nothing that loads is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError, VerificationError

from .support import fake_target
from .support.models import tiny_model

CAPACITY = 64


pytestmark = pytest.mark.usefixtures("fake_backend")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("gemma3_text")


def test_garbage_is_collected_seldom_while_a_program_is_lowered(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of an export to ExecuTorch otherwise; after it, failed or not, as the user had set it."""
    seen = []

    def lower(*arguments: object) -> None:
        seen.append(gc.get_threshold())
        raise InterruptedError

    monkeypatch.setattr(fake_target.FakeBackend, "lower", lower)
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        with pytest.raises(InterruptedError):
            export(model, "fake", CAPACITY, tmp_path / "bundle")
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*before)
    assert seen[0][0] > 10 * 700


def test_failed_verification_leaves_nothing(model: Any, tmp_path: Path) -> None:
    with pytest.raises(VerificationError) as error:
        export(model, "fake", CAPACITY, tmp_path / "out", spoil=0.5)
    message = str(error.value)
    assert all(
        part in message
        for part in ("NOT verified", "5.0e-01 exceeds 1e-04", "40 tokens: 5.0e-01", "out was not written")
    )
    assert list(tmp_path.iterdir()) == []


def test_not_a_number_is_a_failed_verification(model: Any, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="nan exceeds"):
        export(model, "fake", CAPACITY, tmp_path / "out", spoil=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_failed_export_keeps_the_bundle_it_was_to_replace(model: Any, tmp_path: Path) -> None:
    first = export(model, "fake", CAPACITY, tmp_path / "out")
    for options, error in (({"fail": True}, RuntimeError), ({"spoil": 0.5}, VerificationError)):
        with pytest.raises(error):
            export(model, "fake", CAPACITY, tmp_path / "out", overwrite=True, **options)
        assert Bundle.open(tmp_path / "out").manifest == first.manifest
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_lowering_leaves_nothing(model: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the lowering failed"):
        export(model, "fake", CAPACITY, tmp_path / "out", fail=True)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import sys
from exportable_cache import export
from exportable_cache.backends import TARGETS
from tests.support import fake_target
from tests.support.models import tiny_model
TARGETS["fake"] = fake_target.ENTRY
export(tiny_model("llama"), "fake", 64, sys.argv[1], sleep=600)
"""


# At each call to the file system: security/test_kills.py.
@pytest.mark.full
def test_killed_export_leaves_nothing_that_loads(model: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(output)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("sleeping in ")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not output.exists()
    leftovers = list(tmp_path.iterdir())
    assert [str(path) for path in leftovers] == [line.split()[-1]]
    with pytest.raises(BundleError, match="has no manifest.json"):
        Bundle.open(leftovers[0])
    # And the leftovers are in nobody's way.
    assert export(model, "fake", CAPACITY, output).path == output


def test_killed_while_verifying_leaves_nothing_that_loads(model: Any, tmp_path: Path) -> None:
    """The manifest comes after the verification: whatever is there at that time is no bundle."""
    seen = []

    def look(stage: str, done: int, total: int | None) -> None:
        if stage == "verifying" and not seen:
            seen.extend(tmp_path.iterdir())
            with pytest.raises(BundleError, match="has no manifest.json"):
                Bundle.open(seen[0])

    export(model, "fake", CAPACITY, tmp_path / "out", progress=look)
    assert len(seen) == 1
