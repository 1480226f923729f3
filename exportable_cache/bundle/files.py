"""Checks of a bundle's files: sizes, checksums, digests known from earlier checks, and files that are not listed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.fs.files import atomic_path
from ..common.fs.user_files import home_folder
from ..errors import BundleError, InputError
from .entries import rank_folder

if TYPE_CHECKING:
    from ..common.progress import Progress
    from .manifest import Manifest


#: The oldest go first.
MOST_RECORDS = 4096
#: Seconds: a file that changed so lately can change again and keep its time stamp, which has the clock's steps.
SETTLED = 2.0

_FILE = "digests.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HASH_PIECE = 1 << 20
_MOST_THREADS = 8

TOKENIZER_FOLDER = "tokenizer"
#: What `tokenizers` reads by itself.
TOKENIZER_FILE = f"{TOKENIZER_FOLDER}/tokenizer.json"
#: Detail of that file: whether it gives, by itself, what transformers' tokenizer gives.
READS_ALIKE = "reads_alike"
#: Another: the chat template as texts between turns, see `ChatTurns`.
CHAT_TURNS = "chat_turns"
#: Of files that hold programs or weights. Others, such as a README of who copied the folder, are not read.
_READ = (".pt", ".pt2", ".pte", ".ptd", ".plan", ".so", ".safetensors")


def version_of(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Device, inode, size, and when contents and the inode last changed, in nanoseconds: no user can set the last."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def record_path() -> Path:
    """Where the record is."""
    return home_folder() / _FILE


class KnownDigests:
    """Digests by file version; `KnownDigests.read().of(path)` is None of a file that nobody has checked as it is.

    Args:
        records: SHA-256 in hex by version, the oldest first.
    """

    def __init__(self, records: dict[str, str]) -> None:
        self._records = records
        self._noted: dict[str, str] = {}

    @classmethod
    def read(cls) -> KnownDigests:
        """The user's record; empty where there is none, it is damaged, or others can write to it."""
        try:
            path = record_path()
            with path.open("rb") as file:
                if not _private(os.fstat(file.fileno())) or not _private(path.parent.stat()):
                    return cls({})
                records = json.loads(file.read())
        except (OSError, ValueError, RuntimeError, RecursionError):  # RuntimeError: there is no home
            return cls({})
        fits = isinstance(records, dict) and all(
            isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in records.values()
        )
        return cls(records if fits else {})

    def of(self, path: Path) -> str | None:
        """The digest of a file, None where this version of it is not known."""
        return self._records.get(_key(version_of(path.stat())))

    def note(self, version: tuple[int, ...], digest: str) -> None:
        """Remember the digest of a version, unless it is too new to be told from the next one. Threads may call it."""
        if time.time_ns() - max(version[-2:]) > SETTLED * 1e9:
            self._noted[_key(version)] = digest

    def write(self) -> None:
        """Add what was noted to the user's record; without one, files are read again next time."""
        if not self._noted:
            return
        records = {**self._records, **self._noted}
        kept = dict(list(records.items())[-MOST_RECORDS:])
        try:
            path = record_path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                temporary.write_text(json.dumps(kept), encoding="ascii")
        except (OSError, RuntimeError, InputError):
            return


def _key(version: tuple[int, ...]) -> str:
    return "-".join(map(str, version))


def _private(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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


def check_listed(folder: Path, manifest: Manifest) -> None:
    """Refuse files that would be read and whose digest nobody checks, and links.

    A tokenizer reads whatever its folder has: an `added_tokens.json` there changes tokens, a `chat_template.jinja` what
    the model is asked.

    Raises:
        BundleError: If there is one.
    """
    folders = (
        [""] if manifest.ranks is None else ["", *(f"{rank_folder(rank)}/" for rank in range(manifest.ranks.size))]
    )
    try:
        names = [
            place + entry.name
            for place in folders
            if os.path.isdir(folder / place)
            for entry in os.scandir(folder / place)
            if entry.name.endswith(_READ)
        ]
    except OSError as error:
        raise BundleError(f"cannot read {folder}: {error.strerror or error}; check its permissions") from error
    for place, inside, files in os.walk(folder):
        for name in (*inside, *files):
            if os.path.islink(os.path.join(place, name)):
                raise BundleError(
                    f"{Path(place, name)} is a link, so what it shows can lie anywhere; put the file there instead"
                )
    for place, _, files in os.walk(folder / TOKENIZER_FOLDER):
        names += [Path(place, file).relative_to(folder).as_posix() for file in files]
    unlisted = sorted(name for name in names if name not in manifest.files)
    if unlisted:
        raise BundleError(
            f"{folder / unlisted[0]} would be read, but the manifest does not list it, so nobody has checked it; "
            "remove it, or export the model again"
        )
