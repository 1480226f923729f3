"""Changed manifests, and what opening them says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exportable_cache.bundle.bundle import Bundle
from exportable_cache.bundle.files import checksum_of
from exportable_cache.errors import BundleError

#: Tokens that the cache of the bundle under test keeps.
CAPACITY = 64


def edit(folder: Path, change: Callable[[dict], Any], sign: bool = True) -> None:
    """Change the manifest and, so that what else is checked is reached, its checksum."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    if sign:
        fields["checksum"] = checksum_of(fields)
    path.write_text(json.dumps(fields))


def refused(folder: Path, *parts: str, error: type[Exception] = BundleError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        Bundle.open(folder, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message
