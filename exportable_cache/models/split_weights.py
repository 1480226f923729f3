"""Weights of which each process has a part: what they are as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def elements(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor, [count], by their places in the flattened whole.

    Args:
        tensor: Of any shape; split over processes, all of them have to ask.
        where: int64 [count], on the host.
    """
    split = split_tensor(tensor)
    if split is None:
        return tensor.flatten()[where.to(tensor.device)]
    from torch.distributed.tensor import Shard

    if not is_split(tensor):
        return split.to_local().flatten()[where.to(split.device)]
    (placement,) = split.placements
    if type(placement) is not Shard:
        # Interleaved parts, of packed weights.
        return split.full_tensor().flatten()[where.to(split.device)]
    local, dim = split.to_local(), placement.dim
    # As torch cuts: equal parts, but for the last ones.
    first = split.device_mesh.get_local_rank() * -(-split.shape[dim] // split.device_mesh.size())
    places = list(torch.unravel_index(where.to(local.device), tensor.shape))
    places[dim] = places[dim] - first
    is_mine = (places[dim] >= 0) & (places[dim] < local.shape[dim])
    found = torch.zeros(len(where), dtype=tensor.dtype, device=local.device)
    if local.numel():
        found = torch.where(is_mine, local[tuple(place * is_mine for place in places)], found)
    # As bits, which a sum of one number and zeros leaves as they are: in floating point -0.0 would become 0.0.
    bits = found.view(torch.uint8).to(torch.int32)
    dist.all_reduce(bits, group=split.device_mesh.get_group())
    return bits.to(torch.uint8).view(tensor.dtype)


def is_split(tensor: torch.Tensor) -> bool:
    """Whether this process has a part of it only."""
    split = split_tensor(tensor)
    if split is None or split.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in split.placements)


def split_tensor(tensor: torch.Tensor) -> DTensor | None:
    """A tensor as one that processes share, None of an ordinary one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    # Here, as it takes long, and most programs are one process's.
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
