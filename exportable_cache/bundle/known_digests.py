"""What this user's earlier checks found: the digest of each version of a file, so that a file is read once and not at
every start.

The record lies in the user's own cache folder and never in a bundle: one that came with a bundle would say what whoever
made the bundle wants. It is taken only if it belongs to the user and nobody else can write to it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path

from ..common.files import atomic_path
from ..common.own_files import home_folder
from ..errors import InputError

#: The oldest go first.
MOST_RECORDS = 4096
#: Seconds: a file that changed so lately can change again and keep its time stamp, which has the clock's steps.
SETTLED = 2.0

_FILE = "digests.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
