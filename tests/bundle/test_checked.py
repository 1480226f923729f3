"""Bundles that are checked without torch: what `Bundle.open` refuses is refused with the same words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import CheckedBundle
from exportable_cache.errors import BundleError

from .editing import edit


def test_a_whole_bundle_is_opened(folder: Path) -> None:
    checked, bundle = CheckedBundle.read(folder), Bundle.open(folder)
    checked.check()
    assert checked.fields["vocab_size"] == bundle.manifest.vocab_size
    assert {name: (one.sha256, one.bytes, one.details) for name, one in checked.files.items()} == {
        name: (one.sha256, one.bytes, one.details) for name, one in bundle.manifest.files.items()
    }


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


_CHANGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
    "a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "another schema": lambda folder: edit(folder, lambda fields: fields.update(schema_version=1)),
    "another checksum": lambda folder: edit(folder, lambda fields: fields.update(source="x"), sign=False),
    "missing file": lambda folder: (folder / "config.json").unlink(),
    "longer file": lambda folder: _append(folder / "config.json"),
    "changed byte": lambda folder: _flip(folder / "config.json"),
    "unlisted file": lambda folder: (folder / "other.pte").write_bytes(b"x"),
    "link": lambda folder: (folder / "README").symlink_to(folder / "config.json"),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_what_is_refused_has_the_same_message(folder: Path, change: Callable[[Path], object]) -> None:
    change(folder)
    with pytest.raises(BundleError) as whole:
        Bundle.open(folder)
    with pytest.raises(BundleError) as checked:
        CheckedBundle.read(folder).check()
    assert str(checked.value) == str(whole.value)


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "a\nb"])
def test_a_file_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    edit(folder, lambda fields: fields["files"].update({name: fields["files"]["config.json"]}))
    with pytest.raises(BundleError, match="is damaged: file"):
        CheckedBundle.read(folder)


@pytest.mark.parametrize("entry", [None, {}, {"sha256": "x"}, {"sha256": 1, "bytes": 1}, {"sha256": "x", "bytes": 1.5}])
def test_an_entry_that_lists_no_file_is_refused(folder: Path, entry: object) -> None:
    edit(folder, lambda fields: fields["files"].update({"config.json": entry}))
    with pytest.raises(BundleError, match="'config.json' must have sha256 and bytes"):
        CheckedBundle.read(folder)


def test_it_imports_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys\n"
        "from exportable_cache.bundle.files import CheckedBundle\n"
        f"CheckedBundle.read({str(folder)!r}).check(versions=False)\n"
        "print(*[name for name in ('torch', 'transformers', 'numpy', 'pydantic') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
