"""Writing files and folders so that an interrupted write leaves nothing behind that loads."""

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

#: Suffix of what is being written; names begin with a dot.
PARTIAL = ".partial"
#: Suffix of a folder that is being replaced, between two renames.
RETIRED = ".retired"
#: In a folder that is being written, held by the process that writes it.
LOCK_FILE = ".exporting"
#: Seconds since its last change after which a folder counts as left behind, where the system has no locks: a day.
_YOUNG = 86400.0


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, moved onto `path` when the block ends well and removed when it does not.

    The temporary file lies in a locked folder next to `path`, because libraries write temporary files of their own next
    to what they write. What a killed process leaves is removed by the next one: `clear_partials`.

    Raises:
        InputError: If `path` is a folder, a device or anything else than a file: it would be replaced, and /dev/null is
            needed.
        OSError: If it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no file, so nothing is written over it; name a file, or one that is to be made")
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_partials(path.parent, path.name)
    folder, lock = _new_locked(path)
    temporary = folder / f"written{path.suffix}"
    try:
        # Readable by this user alone: states hold what somebody asked, and graphs of others are not loaded.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        _remove(folder)
        if lock is not None:
            os.close(lock)


@contextmanager
def atomic_folder(path: Path, remove: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A temporary folder beside `path`, which takes its place when the block ends well and is removed when it does not.

    An existing `path` is replaced only at that moment, when the new one is on disk. Where the system exchanges two
    folders in one call (Linux, macOS), there is a whole folder at `path` at any time. Elsewhere it takes two renames:
    it goes aside, the new one takes its place; if the second fails, the first is undone; a process killed between them
    (kill -9, a power failure) leaves the earlier folder beside it, see `retired_folder`. What a killed process leaves
    is removed, or put back, by the next one: `clear_leftovers`.

    Args:
        remove: Removes the earlier folder; by default with all that is in it.

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
    # The new folder is in place: what is left of the earlier one is no failure.
    for earlier in (retired, temporary):
        if earlier.exists():
            (remove or _remove)(earlier)


def clear_leftovers(path: Path, remove: Callable[[Path], None] | None = None) -> None:
    """Remove what killed processes left of `atomic_folder(path)`; where they left `path` aside, put it back.

    Args:
        remove: Removes a folder that was at `path`; by default with all that is in it.
    """
    if not path.exists() and (aside := retired_folder(path)) is not None:
        os.replace(aside, path)
    for name in glob.glob(f".{glob.escape(path.name)}.*", root_dir=path.parent):
        left = path.parent / name
        if name.endswith(RETIRED):
            (remove or _remove)(left)
        elif name.endswith(PARTIAL) and left.is_dir() and not left.is_symlink() and _is_abandoned(left):
            # Without a lock it is what was at `path` before an exchange.
            ((remove or _remove) if not (left / LOCK_FILE).exists() else _remove)(left)


def clear_partials(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of `atomic_path` in a folder.

    Args:
        name: Name of the file that was to be written; None for all files of the folder.
    """
    mine = "*" if name is None else f"{glob.escape(name)}.*"
    for found in glob.glob(f".{mine}{PARTIAL}", root_dir=folder):
        left = folder / found
        # Another user's, or gone by now.
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
                # File systems without locks.
                if _is_old(left):
                    _remove(left)
            else:
                left.rmdir()


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _YOUNG


def _remove(folder: Path) -> None:
    # The lock last: without it a folder counts as one that was at its place.
    for path in folder.iterdir() if (folder / LOCK_FILE).exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK_FILE:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _new_locked(path: Path) -> tuple[Path, int | None]:
    """A new folder beside `path`, and the lock in it."""
    while True:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
        try:
            return temporary, _locked(temporary / LOCK_FILE)
        except FileNotFoundError:
            # Another process took the empty folder for one that was left behind.
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
    """Whether no process writes it any more."""
    lock = folder / LOCK_FILE
    if fcntl is None:
        return _is_old(folder)
    if not lock.exists():
        # Empty, or what was at `path` before an exchange.
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
    """Let two folders take each other's place in one call; False where the system, or the file system, cannot.

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
    """Have all files of a folder on disk, and their names."""
    for place, _, files in os.walk(folder):
        for file in files:
            _sync(Path(place, file))
        _sync(Path(place))


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # File systems that keep nothing on a disk have nothing to sync; a disk that is full says so here.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


def retired_folder(path: Path) -> Path | None:
    """The newest folder that was at `path` when `atomic_folder` was killed between its two renames, or None."""
    found = (path.parent / name for name in glob.glob(f".{glob.escape(path.name)}.*{RETIRED}", root_dir=path.parent))
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


#: Mapped files of this process, on Linux.
_MAPS = Path("/proc/self/maps")


def give_back_pages(path: Path) -> None:
    """Let go of the pages of a file that this process maps, locked ones too: what is used of them is read again.

    On Linux; elsewhere, or where the system refuses it, nothing changes. What can be written to is left alone.
    """
    if not _MAPS.is_file():
        return
    library = ctypes.CDLL(None)
    mapped = str(path.resolve())
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        place, access, *_, name = line.split(maxsplit=5)
        if name != mapped or "w" in access:
            continue
        start, end = (int(address, 16) for address in place.split("-"))
        arguments = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        library.munlock(*arguments)
        library.madvise(*arguments, mmap.MADV_DONTNEED)
