"""Check that a file was written by this user, by its permissions and by the user's key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ...errors import InputError

#: Whether the system says who a file belongs to. Windows does not in this form: no owner is checked there.
HAS_OWNERS = hasattr(os, "geteuid")
#: Folder of what this package notes for a user; by default `exportable_cache` in XDG_CACHE_HOME, or ~/.cache.
HOME_VARIABLE = "EXPORTABLE_CACHE_HOME"


def home_folder() -> Path:
    """Where this package keeps what it notes for the user, and the user's key.

    Raises:
        RuntimeError: If the user has no home.
    """
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exportable_cache"


def user_folder(path: Path, make: bool = False) -> Path:
    """A folder in which nobody else can exchange files, as it is to be used from then on: without links.

    Args:
        path: Where it is. One that does not exist is judged by what is above it.
        make: Whether to make one that does not exist, for this user alone.

    Raises:
        InputError: If it, or a folder above it, is somebody else's, or others can write to it.
        OSError: If it cannot be made.
    """
    found = path.resolve()
    if make:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (found, *found.parents) if HAS_OWNERS else ():
        if not folder.exists():
            continue
        reason = _reason(folder.stat(), sticky_is_safe=folder != found)
        if reason is not None:
            raise InputError(
                f"{path} is no place for files that run code when they are read: {folder} {reason}; use a folder that "
                "only you can write to, or make it one (chown, chmod go-w)"
            )
    return found


def is_user_file(descriptor: int) -> bool:
    """Whether an open file is a regular one that is this user's, or root's, and that nobody else can write to."""
    status = os.fstat(descriptor)
    return not HAS_OWNERS or (stat.S_ISREG(status.st_mode) and _reason(status, sticky_is_safe=False) is None)


def is_private_file(descriptor: int) -> bool:
    """Whether an open file is a regular one that is this user's and that nobody else can read or write."""
    status = os.fstat(descriptor)
    return not HAS_OWNERS or (
        stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    )


def sealed(content: bytes, key: bytes, name: str) -> bytes:
    """With a digest before it that only the holder of a key can make.

    Args:
        key: See `user_key.user_key`.
        name: Of the file: one file is not taken for another.
    """
    return _mark(content, key, name) + content


def unsealed(written: bytes, key: bytes, name: str) -> bytes:
    """What `sealed` was given.

    Raises:
        ValueError: If a byte of it has changed, or it was sealed with another key or under another name.
    """
    size = hashlib.sha256().digest_size
    if not hmac.compare_digest(_mark(written[size:], key, name), written[:size]):
        raise ValueError("the file was damaged, or not written with this user's key")
    return written[size:]


def _mark(content: bytes, key: bytes, name: str) -> bytes:
    return hmac.digest(key, hashlib.sha256(name.encode()).digest() + content, "sha256")


def _reason(status: os.stat_result, sticky_is_safe: bool) -> str | None:
    """Why others can change it, None where they cannot."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not _only_group_is_the_users(status):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _only_group_is_the_users(status: os.stat_result) -> bool:
    """Whether it can be written by a group in which the user is alone, as many systems give each one."""
    if status.st_mode & stat.S_IWOTH:
        return False
    try:
        import grp
        import pwd

        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except (ImportError, KeyError):
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


_FILE = "key"
_BYTES = 32


def user_key() -> bytes:
    """The user's key of 32 bytes, which is made when it is first asked for.

    Raises:
        InputError: If there is no place for it, it is damaged, or others can read or change it.
    """
    try:
        path = home_folder() / _FILE
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            is_private, key = is_private_file(file.fileno()), file.read()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise InputError(
            f"compiled graphs are kept under a key of your own, which cannot be read or made: {error}; name a folder "
            f"that you can write to by {HOME_VARIABLE}"
        ) from error
    if not is_private:
        raise InputError(f"{path} is a key that others may know or have put there; remove it, a new one is made then")
    if len(key) != _BYTES:
        raise InputError(f"{path} has {len(key)} bytes, a key has {_BYTES}; remove it, a new one is made then")
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Readable by the user alone from its first byte on.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            # Unlike a rename, it fails where another process was first, whose key counts.
            os.link(name, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
