"""Sizes and checksums of a bundle's files. Several are read at a time: hashing leaves the interpreter free."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BundleError
from .known_digests import KnownDigests, version_of

if TYPE_CHECKING:
    from ..common.progress import Progress
    from .manifest import Manifest

_HASH_PIECE = 1 << 20
_MOST_THREADS = 8


def check_files(
    folder: Path, manifest: Manifest, progress: Progress, known: bool = False, names: Sequence[str] | None = None
) -> None:
    """Refuse files that are not those that the manifest lists, by size and SHA-256.

    Args:
        progress: Told about bytes read.
        known: Go by what this user's earlier checks found of the same file versions, see `KnownDigests`, and read the
            other files only.

    Raises:
        BundleError: If one is missing, truncated or changed.
    """
    files = {name: manifest.files[name] for name in (manifest.files if names is None else names)}
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy the bundle again, or export the model again")
        size = path.stat().st_size
        if size != file.bytes:
            raise BundleError(
                f"{path} has {size} bytes, the manifest says {file.bytes}; copy the bundle again, or export the model "
                "again"
            )
    paths = [folder / name for name in files]
    records = KnownDigests.read()
    found = {path: digest for path in paths if (digest := records.of(path) if known else None) is not None}
    unread = [path for path in paths if path not in found]
    found.update(zip(unread, digests_of(unread, progress, records), strict=True))
    for file, path in zip(files.values(), paths, strict=True):
        if found[path] != file.sha256:
            raise BundleError(
                f"{path} is damaged: its sha256 is {found[path][:12]}..., the manifest says {file.sha256[:12]}...; "
                "copy the bundle again, or export the model again"
            )
    if unread:
        records.write()


def digests_of(paths: Sequence[Path], progress: Progress, records: KnownDigests | None = None) -> list[str]:
    """SHA-256 of files, in hex.

    Args:
        progress: Told about bytes read.
        records: Where the digests are noted, for `KnownDigests.write`.
    """
    total, done, lock = sum(path.stat().st_size for path in paths), 0, threading.Lock()

    def read(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("checking files", done, total)

    def digest_of(path: Path) -> str:
        digest, piece = hashlib.sha256(), bytearray(_HASH_PIECE)
        with path.open("rb", buffering=0) as file:
            version = version_of(os.fstat(file.fileno()))
            while count := file.readinto(piece):
                digest.update(memoryview(piece)[:count])
                read(count)
        if records is not None:
            # Of before it was read: a file that changes meanwhile has another version, and no one looks for this one.
            records.note(version, digest.hexdigest())
        return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(digest_of, paths))
