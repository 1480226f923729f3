"""Pages of mapped files go back to the system, and are read again."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from exportable_cache.common.fs import files
from exportable_cache.common.fs.files import give_back_pages

from .support.memory import of_file

CONTENT = bytes(range(256)) * 16 * 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    # A space in the name, as in /proc/self/maps.
    path = tmp_path / "a file"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux")
@pytest.mark.parametrize("locked", [False, True])
def test_pages_are_given_back_and_read_again(path: Path, locked: bool) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        address = next(
            line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
        )
        if locked and ctypes.CDLL(None).mlock(ctypes.c_void_p(int(address, 16)), ctypes.c_size_t(len(CONTENT))):
            pytest.skip("this user may not lock memory")
        assert mapped[:] == CONTENT
        assert of_file(path, "Rss") == len(CONTENT) and of_file(path, "Locked") == locked * len(CONTENT)
        give_back_pages(path)
        assert of_file(path, "Rss") == of_file(path, "Locked") == 0
        assert mapped[:] == CONTENT


def test_what_was_written_stays(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:3] = b"new"
        give_back_pages(path)
        assert mapped[:6] == b"new" + CONTENT[3:6]


def test_other_systems_keep_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAPS", path.with_name("maps"))
    give_back_pages(path)
