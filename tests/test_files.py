"""Folders that appear whole or not at all, also where a rename fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exportable_cache.common.fs.files import atomic_folder, atomic_path, retired_folder


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").write_text("earlier")
    return folder


def replace(path: Path) -> None:
    with atomic_folder(path) as folder:
        (folder / "file").write_text("new")


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let the rename of this number, from 1 on, fail."""
    rename, done = os.replace, []

    def counted(source: Path, target: Path) -> None:
        done.append(source)
        if len(done) == number:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "replace", counted)


def test_earlier_folder_is_replaced(earlier: Path) -> None:
    replace(earlier)
    assert (earlier / "file").read_text() == "new"
    assert [path.name for path in earlier.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", [OSError("no rename"), KeyboardInterrupt("no rename")])
def test_failed_rename_restores_the_earlier_folder(
    earlier: Path, number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, number, error)
    # As on a system that exchanges no folders.
    monkeypatch.setattr("exportable_cache.common.fs.files.exchange", lambda one, other: False)
    with pytest.raises(type(error), match="no rename"):
        replace(earlier)
    assert (earlier / "file").read_text() == "earlier"
    assert [path.name for path in earlier.parent.iterdir()] == ["out"]


def test_remains_of_the_earlier_folder_are_no_failure(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("no removal")

    monkeypatch.setattr("shutil.rmtree", fail)
    replace(earlier)
    assert (earlier / "file").read_text() == "new"


def test_retired_folder_is_found_by_name(tmp_path: Path) -> None:
    assert retired_folder(tmp_path / "out") is None
    assert retired_folder(tmp_path / "no" / "such" / "parent") is None
    for name in (".out.abc.retired", ".other.abc.retired", ".out.abc.partial"):
        (tmp_path / name).mkdir()
    assert retired_folder(tmp_path / "out") == tmp_path / ".out.abc.retired"
    # A name is no pattern.
    assert retired_folder(tmp_path / "*") is None


def test_an_interrupted_file_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    with atomic_path(path) as temporary:
        temporary.write_text("earlier")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "earlier"
        raise KeyboardInterrupt
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_a_file_comes_into_its_place_as_a_whole(tmp_path: Path) -> None:
    """By its name alone: whoever has the old one open reads that to its end."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"new")
            written = temporary.stat().st_ino
        assert path.stat().st_ino == written
        assert reader.read() == b"old" and path.read_bytes() == b"new"
