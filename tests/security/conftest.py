"""A bundle to attack, and copies of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from exportable_cache import export
from exportable_cache.bundle.files import MANIFEST_FILE, checksum_of

from ..support.store import stored


@pytest.fixture(scope="session")
def pt2_bundle() -> Path:
    """Folder of the demo model exported for `pt2`. Read it only."""
    options = {"target": "pt2", "max_cache_len": 96, "prefill_chunk": 16, "verify": False}
    return stored({"demo": options}, lambda folder: export("demo", output_dir=folder, **options))


@pytest.fixture
def bundle(pt2_bundle: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(pt2_bundle, tmp_path / "bundle"))


def reseal(folder: Path) -> None:
    """Make every checksum right again, as anybody can."""
    import hashlib

    path = folder / MANIFEST_FILE
    fields = json.loads(path.read_text())
    for name, file in fields["files"].items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            file.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    fields["checksum"] = checksum_of(fields)
    path.write_text(json.dumps(fields))
