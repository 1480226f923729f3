"""Atomic writes of files and folders: an interrupted write leaves nothing that loads."""

from __future__ import annotations

import ctypes
import errno
import glob
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Suffix of an unfinished file or folder, whose name begins with a dot.
PARTIAL = ".partial"
#: Suffix of the previous folder between the two renames that replace it.
RETIRED = ".retired"
#: Lock file in an unfinished folder, held by the writing process.
LOCK_FILE = ".exporting"
#: Age in seconds after which an unfinished folder counts as abandoned, on systems without locks.
_YOUNG = 86400.0


@contextmanager
def atomic_path(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """Yield a temporary path, which is moved onto `path` if the block succeeds and removed otherwise.

    The temporary file is in a locked folder next to `path`, because libraries write further temporary files next to
    their output. Files left by a killed process are removed by the next one, see `clear_partials`.

    Args:
        path: File to write.
        mode: Permissions of the file, less those that the umask takes away; by default it is readable by this user
            only, because states hold prompts.

    Raises:
        InputError: If `path` is a folder, a device or anything else than a file.
        OSError: If it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"path must be a file or a new name, got {path}, which is something else; choose another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_partials(path.parent, path.name)
    folder, lock = _new_locked(path)
    temporary = folder / f"written{path.suffix}"
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        permissions = temporary.stat().st_mode
        yield temporary
        # Some libraries replace the file.
        temporary.chmod(permissions & 0o777)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        _remove(folder)
        if lock is not None:
            os.close(lock)


@contextmanager
def atomic_folder(path: Path, remove: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `path` if the block succeeds and is removed otherwise.

    An existing `path` is replaced at the end, when the new folder is on disk. On Linux and macOS the two are exchanged
    in one call, so `path` is complete at any time. Other systems need two renames: if the second fails, the first is
    undone, and a process killed between them leaves the previous folder for `retired_folder`. The next call cleans up
    after a killed process, see `clear_leftovers`.

    Args:
        path: Folder to write.
        remove: Removes the previous folder; by default with everything in it.

    Raises:
        OSError: If the temporary folder cannot be created, or a rename fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, lock = _new_locked(path)
    retired = temporary.with_suffix(RETIRED)
    try:
        yield temporary
        temporary.chmod(0o755)
        _sync_folder(temporary)
        if not path.exists():
            os.replace(temporary, path)
        elif not exchange(temporary, path):
            try:
                os.replace(path, retired)
                os.replace(temporary, path)
            except BaseException:
                if not path.exists():
                    os.replace(retired, path)
                raise
        (path / LOCK_FILE).unlink(missing_ok=True)
        _sync(path.parent)
    except BaseException:
        if temporary.exists():
            _remove(temporary)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    # Not an error if this fails, because the new folder is already installed.
    for earlier in (retired, temporary):
        if earlier.exists():
            (remove or _remove)(earlier)


def clear_leftovers(path: Path, remove: Callable[[Path], None] | None = None) -> None:
    """Remove the folders that killed calls of `atomic_folder(path)` left; restore `path` if they had renamed it.

    Args:
        path: Folder that was to be written.
        remove: Removes a previous folder; by default with everything in it.
    """
    if not path.exists() and (previous := retired_folder(path)) is not None:
        os.replace(previous, path)
    for name in glob.glob(f".{glob.escape(path.name)}.*", root_dir=path.parent):
        left = path.parent / name
        if name.endswith(RETIRED):
            (remove or _remove)(left)
        elif name.endswith(PARTIAL) and left.is_dir() and not left.is_symlink() and _is_abandoned(left):
            # A folder without a lock is the previous `path`, from before an exchange.
            ((remove or _remove) if not (left / LOCK_FILE).exists() else _remove)(left)


def clear_partials(folder: Path, name: str | None = None) -> None:
    """Remove the files that killed calls of `atomic_path` left in a folder.

    Args:
        folder: Folder to clean.
        name: Name of the file that was to be written; None for all files of the folder.
    """
    pattern = "*" if name is None else f"{glob.escape(name)}.*"
    for found in glob.glob(f".{pattern}{PARTIAL}", root_dir=folder):
        left = folder / found
        # The file may belong to another user, or be gone by now.
        with suppress(OSError):
            if left.is_symlink():
                continue
            if not left.is_dir():
                # Earlier releases wrote files without a lock.
                if _is_old(left):
                    left.unlink()
            elif (left / LOCK_FILE).exists():
                if _is_abandoned(left):
                    _remove(left)
            elif any(left.iterdir()):
                # The file system has no locks.
                if _is_old(left):
                    _remove(left)
            else:
                left.rmdir()


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _YOUNG


def _remove(folder: Path) -> None:
    # Remove the lock last, because a folder without one counts as the previous `path`.
    for path in folder.iterdir() if (folder / LOCK_FILE).exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK_FILE:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _new_locked(path: Path) -> tuple[Path, int | None]:
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
        try:
            return temporary, _locked(temporary / LOCK_FILE)
        except FileNotFoundError:
            # Another process has removed the empty folder as abandoned.
            continue


def _locked(path: Path) -> int | None:
    """Hold a file for as long as this process lives; None where the system has no such locks."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        os.close(handle)
        path.unlink()
        return None
    return handle


def _is_abandoned(folder: Path) -> bool:
    """Return True if no process is writing the folder."""
    lock = folder / LOCK_FILE
    if fcntl is None:
        return _is_old(folder)
    if not lock.exists():
        # The folder is empty, or the previous `path` from before an exchange.
        return True
    handle = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one call; return False if the system or the file system cannot.

    Linux has `renameat2` with RENAME_EXCHANGE (2), macOS `renamex_np` with RENAME_SWAP (2).
    """
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        here = -100  # AT_FDCWD
        return library.renameat2(here, paths[0], here, paths[1], 2) == 0
    return hasattr(library, "renamex_np") and library.renamex_np(*paths, 2) == 0


def _sync_folder(folder: Path) -> None:
    """Flush all files of a folder, and their names, to disk."""
    for root, _, files in os.walk(folder):
        for file in files:
            _sync(Path(root, file))
        _sync(Path(root))


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # File systems without a disk cannot sync; a full disk is reported here.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


def retired_folder(path: Path) -> Path | None:
    """Return the newest previous version of `path` that a killed `atomic_folder` left, or None."""
    found = (path.parent / name for name in glob.glob(f".{glob.escape(path.name)}.*{RETIRED}", root_dir=path.parent))
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


#: Mapped files of this process, on Linux.
_MAPS = Path("/proc/self/maps")


def give_back_pages(path: Path) -> None:
    """Release the pages of a file that this process has mapped, locked ones too. They are read again when used.

    Linux only; elsewhere, or if the system refuses, nothing changes. Writable mappings are left alone.
    """
    if not _MAPS.is_file():
        return
    library = ctypes.CDLL(None)
    mapped = str(path.resolve())
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        addresses, access, *_, name = line.split(maxsplit=5)
        if name != mapped or "w" in access:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        arguments = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        library.munlock(*arguments)
        library.madvise(*arguments, mmap.MADV_DONTNEED)
