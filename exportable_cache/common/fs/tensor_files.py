"""Tensors in files: saved states and caches with a checksum, and temporary tensors that are mapped from a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ...errors import BundleError, ExportableCacheError, InputError, first_line
from .files import atomic_path

if TYPE_CHECKING:
    import torch

_CHECKSUM = "checksum"


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], mode: int = 0o600
) -> None:
    """Write a safetensors file atomically, with a checksum of its tensors and metadata.

    Args:
        path: File to write.
        tensors: Contiguous tensors on the host, by name.
        metadata: Strings to store alongside, including `format`.
        mode: See `atomic_path`.

    Raises:
        InputError: If `path` exists and is not a file.
        OSError: If it cannot be written.
    """
    # Not at the top, because it imports torch, which an ExecuTorch bundle does not need.
    from safetensors.torch import save_file

    checksum = _checksum_of(tensors, metadata)
    with atomic_path(path, mode) as temporary:
        save_file(dict(tensors), temporary, metadata={**metadata, _CHECKSUM: checksum})


def read_tensors(
    path: Path | str, what: str, expected: str, writer: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and metadata of a file written by `write_tensors`.

    Args:
        path: File to read.
        what: Name of the content, for messages.
        expected: Required `format` of the metadata. Files of earlier formats have no checksum and are refused.
        writer: Function that writes such files, for messages.
        device: Device of the returned tensors.

    Raises:
        BundleError: If the file is missing, damaged, of another format, or its checksum is wrong.
        InputError: If there is no such device.
    """
    from ..tensors import ordinary_tensors

    try:
        with ordinary_tensors(), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise BundleError(f"cannot read {what} from {path}: {first_line(error)}; save it again") from error
    if metadata.get("format") != expected:
        raise BundleError(
            f"{path} has format {metadata.get('format')!r}, expected {expected!r}; it was not written by {writer} of "
            "this release: save it again"
        )
    found = _checksum_of(tensors, {name: text for name, text in metadata.items() if name != _CHECKSUM})
    recorded = metadata.get(_CHECKSUM)
    if found != recorded:
        says = f"it records {recorded[:12]}..." if recorded else "it records none"
        raise BundleError(
            f"{path} is damaged: checksum: its content has sha256 {found[:12]}..., {says}; copy it again, or save it "
            "again"
        )
    try:
        with ordinary_tensors():
            # Copied, because tensors in the file are not aligned as torch aligns them, which changes how kernels round.
            return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}, metadata
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device must be one that torch has here, got {str(device)!r} ({first_line(error)})"
        ) from error


@contextmanager
def damaged_if_malformed(path: Path | str, what: str, remedy: str = "save it again") -> Iterator[None]:
    """Convert errors of malformed data within a block into `BundleError`.

    Args:
        path: File that was read.
        what: Name of the content, for the message.
        remedy: Advice at the end of the message.

    Raises:
        BundleError: If a part is missing, or has another type or size.
    """
    try:
        yield
    except ExportableCacheError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise BundleError(
            f"{path} is damaged: {what} has {type(error).__name__}: {first_line(error)[:200]}; {remedy}"
        ) from error


def _checksum_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return the sha256 of metadata and of each tensor's name, dtype, shape and bytes, in sorted order."""
    import torch

    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode("ascii"))
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode("ascii"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


#: Bytes of quantized or packed weights that an export keeps in memory; more go to temporary files.
MAX_WEIGHTS_IN_MEMORY = 2_000_000_000


class Scratch:
    """A factory of tensors in temporary files, which the system can write out if memory is short.

    No other process sees the files. They disappear with their tensors, also when the process is killed.

    Args:
        folder: Existing folder on the file system to use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def for_weights(cls, folder: Path, size: int) -> Scratch | None:
        """Return a factory for weights of `size` bytes, or None if they fit into memory or not onto the disk.

        The disk must have room for them twice, because a program is written next to them.
        """
        if size <= MAX_WEIGHTS_IN_MEMORY or not cls.available() or shutil.disk_usage(folder).free < 2 * size:
            return None
        return cls(folder)

    @staticmethod
    def available() -> bool:
        """Return True if disk space can be reserved, because writing to a map on a full disk kills the process."""
        return hasattr(os, "posix_fallocate")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros.

        Raises:
            OSError: If the disk has no room for it.
        """
        import torch

        size = math.prod(shape) * dtype.itemsize
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".scratch-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=size)
        return torch.tensor([], dtype=dtype).set_(storage).view(*shape)  # type: ignore[arg-type]
