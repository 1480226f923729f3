"""The folder of a bundle appears whole or not at all, and takes nothing that is not its own away."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from exportable_cache.bundle.builder import check_free, new_folder
from exportable_cache.bundle.bundle import Bundle
from exportable_cache.errors import BundleError

from .editing import refused


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "new"
    with pytest.raises(RuntimeError, match="stop"), new_folder(target, overwrite=False) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError("stop")
    assert not target.exists()
    assert list(target.parent.iterdir()) == []
    with new_folder(target, overwrite=False) as folder:
        (folder / "file").write_text("whole")
        assert not target.exists()
    assert (target / "file").read_text() == "whole"


def test_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with pytest.raises(BundleError, match="is never overwritten"), new_folder(target, overwrite=True):
        target.mkdir()
        (target / "precious").write_text("1")
    assert [path.name for path in target.iterdir()] == ["precious"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_only_bundles_are_overwritten(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("1")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("1")
    check_free(tmp_path / "new", overwrite=False)
    check_free(tmp_path / "empty", overwrite=False)
    check_free(folder, overwrite=True)
    with pytest.raises(BundleError, match="bundle exists; choose another folder, or overwrite it"):
        check_free(folder, overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(BundleError, match="home exists and is not a bundle, so it is never overwritten"):
            check_free(tmp_path / "home", overwrite=overwrite)
        with pytest.raises(BundleError, match="file exists and is not a folder"):
            check_free(tmp_path / "file", overwrite=overwrite)
        with pytest.raises(BundleError, match="cannot write .*file is not a folder"):
            check_free(tmp_path / "file" / "new", overwrite=overwrite)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_where_no_folder_can_be_created() -> None:
    with pytest.raises(BundleError, match="cannot write /proc/out: .*; choose a folder that you can write to"):
        check_free(Path("/proc/out"), overwrite=False)
    with pytest.raises(BundleError, match="cannot write /proc/deep/out: .*; choose a folder that you can write to"):
        check_free(Path("/proc/deep/out"), overwrite=False)


def test_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot write .*a: File name too long; choose"):
        check_free(tmp_path / ("a" * 300), overwrite=False)


def test_check_leaves_no_trace(tmp_path: Path) -> None:
    check_free(tmp_path / "deep" / "new", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_can_no_longer_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("exportable_cache.bundle.builder.check_free", lambda path, overwrite: None)
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(BundleError, match="cannot write .*out: No space left on device; choose"):
        with new_folder(tmp_path / "out", overwrite=False):
            pytest.fail("the block ran")


def test_own_errors_of_the_block_pass(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine"), new_folder(tmp_path / "out", overwrite=False):
        raise OSError("mine")
    assert list(tmp_path.iterdir()) == []


def test_killed_overwrite_is_told_where_the_earlier_bundle_is(folder: Path) -> None:
    retired = folder.rename(folder.with_name(".bundle.abc123.retired"))
    refused(folder, "there is no folder", "killed while replacing it", f"rename {retired} to ")
    retired.rename(folder)
    assert Bundle.open(folder).manifest.target == "fake"


def test_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link", overwrite=False) as folder:
        (folder / "file").write_text("1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "1"
