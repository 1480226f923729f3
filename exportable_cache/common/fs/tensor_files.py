"""Tensors in files: saved states and caches with a checksum, and temporary tensors that are mapped from a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
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


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, with a checksum over all that it holds.

    Args:
        tensors: Contiguous tensors on the host, by name.
        metadata: What is written alongside, its `format` included.

    Raises:
        InputError: If there is something else than a file at `path`.
        OSError: If it cannot be written.
    """
    # Not at the top: it imports torch, and running a bundle of ExecuTorch does without.
    from safetensors.torch import save_file

    checksum = _checksum_of(tensors, metadata)
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata={**metadata, _CHECKSUM: checksum})


def read_tensors(
    path: Path | str, what: str, expected: str, writer: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return tensors and metadata of a file that `write_tensors` wrote.

    Args:
        what: What the file holds, for messages.
        expected: The `format` that its metadata must state. Files of earlier formats have no checksum and are refused.
        writer: What writes such files, for messages.
        device: Where to put the tensors.

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
            # Copied, because a tensor in the file is not aligned as torch's own are, and kernels then round otherwise.
            return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}, metadata
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device must be one that torch has here, got {str(device)!r} ({first_line(error)})"
        ) from error


@contextmanager
def damaged_if_malformed(path: Path | str, what: str, remedy: str = "save it again") -> Iterator[None]:
    """Turn whatever does not fit in the parts of a file that was opened into one error.

    Args:
        what: What the file holds, for the message.
        remedy: What to do then.

    Raises:
        BundleError: If a part is missing, or is of another type or size.
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
    """Return the sha256 of metadata, and of name, dtype, shape and bytes of each tensor, whatever their order."""
    import torch

    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode("ascii"))
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode("ascii"))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Scratch:
    """Makes tensors that lie in files which nobody else sees and which go with them, also when the process is killed.

    Args:
        folder: Of the file system that they are on; it has to exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def available() -> bool:
        """Whether room can be taken first: a write into a map for which the disk has none ends the process."""
        return hasattr(os, "posix_fallocate")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros.

        Raises:
            OSError: If the disk has no room for it.
        """
        import torch

        size = math.prod(shape) * dtype.itemsize
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".scratch-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=size)
        return torch.tensor([], dtype=dtype).set_(storage).view(*shape)  # type: ignore[arg-type]
