"""Overwriting removes what an export wrote and nothing else; what killed exports leave is cleared up; full disks."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export
from exportable_cache.backends import TARGETS
from exportable_cache.bundle.builder import check_free, new_folder
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.common.fs import files
from exportable_cache.errors import BundleError

from ..support import fake_target
from ..support.models import tiny_model


def test_manifests_of_other_programs_are_not_ours(tmp_path: Path) -> None:
    for number, content in enumerate(('{"manifest_version": 3, "name": "an extension"}', "[]", "{", '{"files": 3}')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "manifest.json").write_text(content)
        (folder / "background.js").write_text("precious")
        with pytest.raises(BundleError, match=r"holds background.js, which no export wrote"):
            check_free(folder, overwrite=True)
        (folder / "background.js").unlink()
        with pytest.raises(BundleError, match="manifest.json"):
            check_free(folder, overwrite=True)
        assert (folder / "manifest.json").read_text() == content


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt", "tokenizer/mine.json"])
def test_a_file_that_no_export_wrote_stops_it(bundle: Path, name: str) -> None:
    check_free(bundle, overwrite=True)
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("precious")
    with pytest.raises(BundleError, match=f"holds {name}, which no export wrote"):
        check_free(bundle, overwrite=True)
    assert Bundle.open(bundle, check_files=False) if not name.startswith("tokenizer") else True


def test_a_file_that_comes_at_the_last_moment_stays(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.exchange

    def late(one: Path, other: Path) -> bool:
        (other / "late.txt").write_text("precious")
        return real(one, other)

    monkeypatch.setattr(files, "exchange", late)
    with new_folder(bundle, overwrite=True) as folder:
        (folder / "new").write_text("new")
    assert [path.name for path in bundle.iterdir()] == ["new"]
    assert [path.read_text() for path in bundle.parent.rglob("late.txt")] == ["precious"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")
@pytest.mark.parametrize("exchanges", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_export_killed_at_any_call_leaves_nothing_after_the_next(
    bundle: Path, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Kill it at every third call, and with `--full` at each."""
    source = Path(shutil.copytree(bundle, tmp_path / "source"))
    if not exchanges:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    killed, step = 0, 1 if request.config.getoption("--full") else 3
    for number in itertools.count(1, step):
        child = os.fork()
        if child == 0:
            _overwrite_until(number, bundle, source)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WIFSIGNALED(status)
        killed += 1
        # A whole bundle is there at any time: at its place or, without an exchange, beside it.
        whole = bundle if bundle.exists() else files.retired_folder(bundle)
        assert bundle.exists() or not exchanges
        Bundle.open(whole, check_versions=False)
    assert killed * step > 40
    Bundle.open(bundle, check_versions=False)
    left = sorted(str(path) for path in bundle.parent.rglob("*") if ".partial" in str(path))
    assert not left


def _overwrite_until(number: int, bundle: Path, source: Path) -> None:
    """Overwrite a bundle in this process, which is killed at the file-system call of this number."""
    left = [number]

    def counted(real: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("replace", "unlink", "rmdir", "mkdir", "fsync", "open"):
        setattr(os, name, counted(getattr(os, name)))
    files.exchange = counted(files.exchange)
    try:
        with new_folder(bundle, overwrite=True) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with new_folder(target, overwrite=False) as first:
        (first / "half").write_text("1")
        with new_folder(target, overwrite=False):
            assert (first / "half").exists()
        (target / files.LOCK_FILE).unlink(missing_ok=True)
        assert target.is_dir()
    assert (target / "half").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            BundleError, match=r"cannot write .*: no space left on device \(needs more than [\d,]+ bytes"
        ):
            export(tiny_model("llama"), "pt2", 32, tmp_path / "out", prefill_chunk=8, verify=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage())
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    with pytest.raises(BundleError, match="no space left on device"):
        export(tiny_model("llama"), "fake", 32, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
def test_a_disk_that_fills_up_while_a_pte_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its repeated weights."""

    class Program:
        def write_to_file(self, file: Any) -> None:
            file.write(bytes(100_000))

    tied = pytest.importorskip("exportable_cache.backends.executorch.pte.rewrite")
    halves = lambda data: [memoryview(data)[:50_000], memoryview(data)[50_000:]]  # noqa: E731
    monkeypatch.setattr(tied, "deduplicated", halves)
    (tmp_path / "program.pte.tied").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        tied.write_pte(Program(), tmp_path / "program.pte")


class _Usage:
    free = 10
