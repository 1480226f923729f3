"""Writing files and folders so that an interrupted write leaves nothing behind that loads."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ..errors import BundleError

if TYPE_CHECKING:
    import torch

#: Suffix of what is being written; names begin with a dot.
PARTIAL = ".partial"
#: Suffix of a folder that is being replaced, between two renames.
RETIRED = ".retired"


def read_tensors(
    path: Path | str, what: str, expected: str, writer: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file whose metadata has the `format` that is expected.

    Args:
        what: The file holds, for messages; `writer` makes such files.

    Raises:
        BundleError: If the file is missing, damaged or has another format.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            # Copied, as a tensor's place in the file is not aligned as torch's own are, and kernels then round
            # otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise BundleError(f"cannot read {what} from {path}: {error}; save it again") from error
    if metadata.get("format") != expected:
        raise BundleError(
            f"{path} has format {metadata.get('format')!r}, expected {expected!r}; it was not written by {writer}"
        )
    return tensors, metadata


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it when the block ends well and removed when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, renamed to it when the block ends well and removed when it does not.

    An existing `path` is replaced only at that moment, by two renames: it goes aside, the new one takes its place. If
    the second fails, the first is undone. Between them there is nothing at `path`, and a process killed there (kill -9,
    a power failure) leaves it so: the earlier folder is then beside it, whole, see `retired_folder`, and so is the new
    one, under its temporary name. A process killed right after them leaves the earlier folder to be deleted by hand.

    Raises:
        OSError: If the temporary folder cannot be created, or a rename fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=PARTIAL, dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            retired = temporary.with_suffix(RETIRED)
            try:
                os.replace(path, retired)
                os.replace(temporary, path)
            except BaseException:
                if not path.exists():
                    os.replace(retired, path)
                raise
            # The new folder is in place: what is left of the earlier one is no failure.
            shutil.rmtree(retired, ignore_errors=True)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def retired_folder(path: Path) -> Path | None:
    """The newest folder that was at `path` when `atomic_folder` was killed between its two renames, or None."""
    found = (path.parent / name for name in glob.glob(f".{glob.escape(path.name)}.*{RETIRED}", root_dir=path.parent))
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)
