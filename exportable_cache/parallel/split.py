"""Tensors that are split over processes: by torch's DTensor, or by this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class PartOf:
    """A description of a tensor that is a part of one that processes share, kept in its attribute `part_of`.

    Attributes:
        shape: Shape of the whole tensor.
        dim: Dimension along which it is split.
        first: Index of the part's first element in that dimension.
        group: The processes; several may have the same part. None for a part that a program is exported from.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    group: ProcessGroup | None


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the tensor that it is a part of."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def is_split(tensor: torch.Tensor) -> bool:
    """Return True if this process has only a part of a tensor."""
    if part_of(tensor) is not None:
        return True
    split = split_tensor(tensor)
    if split is None or split.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in split.placements)


def part_of(tensor: torch.Tensor) -> PartOf | None:
    """Return the description of a part of a tensor, or None."""
    return getattr(tensor, "part_of", None)


def split_tensor(tensor: torch.Tensor) -> DTensor | None:
    """Return a tensor as a DTensor, or None if it is not one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    # Imported here because it is slow, and most programs use one process.
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
