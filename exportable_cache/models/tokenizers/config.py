"""What a tokenizer's config may not name: files elsewhere, which transformers would read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import BundleError, first_line


def check_tokenizer_config(folder: Path) -> None:
    """Refuse a tokenizer of a bundle whose config names files: transformers would read them, wherever they are.

    Raises:
        BundleError: If there is such a name, or the config cannot be read.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    try:
        named = next(_named_files(json.loads(path.read_bytes()), folder), None)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"cannot read {path}: {first_line(error)[:200]}; export the model again") from error
    if named is not None:
        raise BundleError(
            f"{path} names a file of its own, {named[0]}: {named[1]!r:.100}, which would be read from there; do not "
            "trust this bundle, or remove the entry"
        )


def _named_files(value: Any, folder: Path, key: str = "", in_list: bool = False) -> Iterator[tuple[str, str]]:
    """Keys and values that are taken for files."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named_files(item, folder, name)
    elif isinstance(value, list):
        for item in value:
            yield from _named_files(item, folder, key, in_list=True)
    elif isinstance(value, str) and key in ("vocab", "merges") and not in_list:
        yield key, value
    elif isinstance(value, str) and key.endswith(("_file", "_path")) and key != "name_or_path":
        path = Path(value)
        if path.is_absolute() or ".." in path.parts or (os.path.exists(value) and not (folder / value).is_file()):
            yield key, value
