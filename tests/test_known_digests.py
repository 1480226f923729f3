"""A file is read once per version: what is noted, where, and what makes it be read again."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache import export, load
from exportable_cache.backends import TARGETS
from exportable_cache.bundle import files
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import KnownDigests, digests_of, record_path
from exportable_cache.common.progress import silent
from exportable_cache.errors import BundleError

from .support import fake_target
from .support.models import tiny_model

FILES = ("program.fake", "config.json", "generation_config.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose files are old enough to be noted, and a user who has checked nothing."""
    monkeypatch.setitem(TARGETS, "fake", fake_target.ENTRY)
    monkeypatch.setenv("EXPORTABLE_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(files, "SETTLED", -60)
    return export(tiny_model("llama"), "fake", 32, tmp_path / "bundle", verify=False).path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read."""
    names: list[str] = []

    def noting(paths: Any, *arguments: Any) -> list[str]:
        names.extend(path.name for path in paths)
        return digests_of(paths, *arguments)

    monkeypatch.setattr(files, "digests_of", noting)
    return names


def reads(read: list[str], call: Callable[[], Any]) -> list[str]:
    read.clear()
    call()
    return sorted(read)


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    """Other contents of the same length, in place, with the time stamps of before."""
    contents, status = bytearray(path.read_bytes()), path.stat()
    change(contents)
    path.write_bytes(contents)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def flip(contents: bytearray) -> None:
    contents[-1] ^= 1


def test_a_file_is_read_once_and_again_when_asked(folder: Path, read: list[str]) -> None:
    everything = sorted(FILES)
    assert reads(read, lambda: load(folder)) == everything
    assert reads(read, lambda: load(folder)) == []
    assert reads(read, lambda: load(folder, check=True)) == everything
    assert reads(read, lambda: Bundle.open(folder)) == everything
    assert reads(read, lambda: load(folder)) == []


def test_a_changed_file_is_read_again_though_its_size_and_time_stay(folder: Path, read: list[str]) -> None:
    load(folder)
    rewrite(folder / "program.fake", flip)
    read.clear()
    with pytest.raises(BundleError, match="program.fake is damaged: its sha256"):
        load(folder)
    assert read == ["program.fake"]
    rewrite(folder / "program.fake", flip)
    load(folder)


def test_what_is_known_of_a_file_must_be_what_the_manifest_says(folder: Path) -> None:
    load(folder)
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    fields["files"]["config.json"]["sha256"] = "0" * 64
    from exportable_cache.bundle.files import checksum_of

    path.write_text(json.dumps({**fields, "checksum": checksum_of(fields)}))
    with pytest.raises(BundleError, match="config.json is damaged: its sha256 is .*the manifest says 000000000000"):
        load(folder)


def test_the_record_is_the_users_and_no_bundles(folder: Path, tmp_path: Path) -> None:
    before = {path.name for path in folder.rglob("*")}
    load(folder)
    assert {path.name for path in folder.rglob("*")} == before
    assert record_path() == tmp_path / "home" / "digests.json"
    assert record_path().parent.stat().st_mode & 0o077 == 0 and record_path().stat().st_mode & 0o077 == 0
    recorded = json.loads(record_path().read_text())
    assert set(recorded.values()) == {hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    assert str(folder) not in record_path().read_text()


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_record_that_others_can_write_to_is_not_taken(folder: Path, read: list[str], where: str) -> None:
    load(folder)
    target = record_path() if where == "file" else record_path().parent
    target.chmod(target.stat().st_mode | 0o020)
    assert reads(read, lambda: load(folder)) == sorted(FILES)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": "b"}', "[" * 100000])
def test_a_damaged_record_is_none(folder: Path, read: list[str], text: str) -> None:
    load(folder)
    record_path().write_text(text)
    assert reads(read, lambda: load(folder)) == sorted(FILES)
    assert reads(read, lambda: load(folder)) == []


def test_without_a_folder_to_write_to_files_are_read_each_time(
    folder: Path, read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPORTABLE_CACHE_HOME", str(tmp_path / "file" / "home"))
    for _ in range(2):
        assert reads(read, lambda: load(folder)) == sorted(FILES)


def test_files_that_have_just_changed_are_not_noted(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED", 60)
    load(folder)
    assert reads(read, lambda: load(folder)) == sorted(FILES)


def test_the_oldest_records_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_RECORDS", 4)
    for count in range(6):
        records = KnownDigests.read()
        records.note((count, 0, 0, 0, 0), "0" * 64)
        records.write()
    assert [name[0] for name in json.loads(record_path().read_text())] == ["2", "3", "4", "5"]


def test_files_are_hashed_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "cpu_count", lambda: 2)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_bytes(path.name.encode() * 5)
    # Each of the first two waits for the other.
    barrier, counts = threading.Barrier(2, timeout=30), []

    def progress(stage: str, done: int, total: int) -> None:
        counts.append((done, total))

    original = files.version_of
    meeting = iter([True, True])

    def waiting(status: os.stat_result) -> Any:
        if next(meeting, False):
            barrier.wait()
        return original(status)

    monkeypatch.setattr(files, "version_of", waiting)
    found = digests_of(paths, progress)
    assert found == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert counts == [(5, 15), (10, 15), (15, 15)] and digests_of([], silent) == []
