"""Sizes and checksums of a bundle's files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BundleError

if TYPE_CHECKING:
    from ..common.progress import Progress
    from .manifest import Manifest

_HASH_PIECE = 1 << 20


def check_files(folder: Path, manifest: Manifest, progress: Progress) -> None:
    total, done = sum(file.bytes for file in manifest.files.values()), 0
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy the bundle again, or export the model again")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {file.bytes}; copy the bundle again, or export the model "
                "again"
            )
        digest = sha256_of(path, progress, done, total)
        if digest != file.sha256:
            raise BundleError(
                f"{path} is damaged: its sha256 is {digest[:12]}..., the manifest says {file.sha256[:12]}...; "
                "copy the bundle again, or export the model again"
            )
        done += size


def sha256_of(path: Path, progress: Progress, done: int, total: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_PIECE):
            digest.update(piece)
            done += len(piece)
            progress("checking files", done, total)
    return digest.hexdigest()
