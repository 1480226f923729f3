"""Tensors in files of their own: the system writes them out when memory is short, as it does with maps."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch


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
        size = math.prod(shape) * dtype.itemsize
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".scratch-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=size)
        return torch.tensor([], dtype=dtype).set_(storage).view(*shape)  # type: ignore[arg-type]
