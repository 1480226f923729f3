"""Checks that the current user wrote a file, by its permissions and by the user's key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ...errors import InputError

#: True if files have POSIX owners. Windows has none, so owners are not checked there.
HAS_OWNERS = hasattr(os, "geteuid")
#: Variable with the user's folder; by default `exportable_cache` in XDG_CACHE_HOME or ~/.cache.
HOME_VARIABLE = "EXPORTABLE_CACHE_HOME"


def home_folder() -> Path:
    """Return the folder of the user's records and key.

    Raises:
        RuntimeError: If the user has no home directory.
    """
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exportable_cache"


def user_folder(path: Path, make: bool = False) -> Path:
    """Return a folder with links resolved, checked to be writable by the current user only.

    Args:
        path: The folder. If it does not exist, its parents are checked.
        make: True to create a missing folder, for this user only.

    Raises:
        InputError: If the folder, or one above it, belongs to or can be written by another user.
        OSError: If it cannot be created.
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
                f"{path} must be writable by you only, because files in it run code; {folder} {reason}; use another "
                "folder, or change it (chown, chmod go-w)"
            )
    return found


def is_user_file(descriptor: int) -> bool:
    """Return True for an open regular file of this user or root that no other user can write."""
    status = os.fstat(descriptor)
    return not HAS_OWNERS or (stat.S_ISREG(status.st_mode) and _reason(status, sticky_is_safe=False) is None)


def is_private_file(descriptor: int) -> bool:
    """Return True for an open regular file of this user that no other user can read or write."""
    status = os.fstat(descriptor)
    return not HAS_OWNERS or (
        stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    )


def sealed(content: bytes, key: bytes, name: str) -> bytes:
    """Return `content` with a keyed digest (HMAC) in front.

    Args:
        content: Bytes to protect.
        key: See `user_key`.
        name: Name of the file, so that one file cannot replace another.
    """
    return _mark(content, key, name) + content


def unsealed(written: bytes, key: bytes, name: str) -> bytes:
    """Return the content that was given to `sealed`.

    Raises:
        ValueError: If a byte has changed, or the key or the name is another.
    """
    size = hashlib.sha256().digest_size
    if not hmac.compare_digest(_mark(written[size:], key, name), written[:size]):
        raise ValueError("the file was damaged, or not written with this user's key")
    return written[size:]


def _mark(content: bytes, key: bytes, name: str) -> bytes:
    return hmac.digest(key, hashlib.sha256(name.encode()).digest() + content, "sha256")


def _reason(status: os.stat_result, sticky_is_safe: bool) -> str | None:
    """Return why other users can change the file, or None if they cannot."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not _only_group_is_the_users(status):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _only_group_is_the_users(status: os.stat_result) -> bool:
    """Return True if only a group can write it whose single member is the user, as many systems create."""
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
    """Return the user's key of 32 bytes; create it on first use.

    Raises:
        InputError: If the key cannot be created or read, is damaged, or can be read or changed by another user.
    """
    try:
        path = home_folder() / _FILE
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            is_private, key = is_private_file(file.fileno()), file.read()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise InputError(
            f"the key that protects compiled graphs cannot be read or created: {error}; set {HOME_VARIABLE} to a "
            "folder that you can write to"
        ) from error
    if not is_private:
        raise InputError(f"{path} must be readable by you only; remove it, and a new key will be created")
    if len(key) != _BYTES:
        raise InputError(f"{path} must have {_BYTES} bytes, got {len(key)}; remove it, and a new key will be created")
    return key


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # mkstemp creates the file readable by the user only.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            # A link fails if another process was faster, unlike a rename; that key is used.
            os.link(name, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
