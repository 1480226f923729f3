"""Changing `.pt2` files as somebody who means harm would."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

from exportable_cache.backends.pt2.contents import EntryWriter


def entries_of(path: Path) -> dict[str, bytes]:
    """The entries of an archive by name, without their folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, entries: dict[str, bytes]) -> Path:
    """An archive of these entries at `path`."""
    with EntryWriter(path, "program") as writer:
        for name, data in entries.items():
            writer.write(name, data)
    return path


def with_json(entries: dict[str, bytes], name: str, change: Callable[[dict], None]) -> dict[str, bytes]:
    """The entries with one JSON entry changed in place."""
    content = json.loads(entries[name])
    change(content)
    return {**entries, name: json.dumps(content).encode()}
