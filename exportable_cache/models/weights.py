"""Weights of a model: their fingerprint, and tensors that are split over processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class PartOf:
    """Where an ordinary tensor lies in one that processes share; kept on it as `part_of`.

    Attributes:
        shape: Of the whole.
        dim: Along which it is cut.
        first: Index of the part's beginning.
        group: The processes; several may have the same part. None of a part that a program is made of.
    """

    shape: tuple[int, ...]
    dim: int
    first: int
    group: ProcessGroup | None


def elements(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor, [count], by their places in the flattened whole.

    Args:
        tensor: Of any shape; split over processes, all of them have to ask.
        where: int64 [count], on the host.
    """
    split, part = split_tensor(tensor), part_of(tensor)
    if split is None and part is None:
        return tensor.flatten()[where.to(tensor.device)]
    local = tensor
    if split is not None:
        from torch.distributed.tensor import Shard

        local, mesh = split.to_local(), split.device_mesh
        if not is_split(tensor):
            return local.flatten()[where.to(local.device)]
        (placement,) = split.placements
        if type(placement) is not Shard:
            # Interleaved parts, of packed weights.
            return split.full_tensor().flatten()[where.to(local.device)]
        # As torch cuts: equal parts, but for the last ones.
        first = mesh.get_local_rank() * -(-split.shape[placement.dim] // mesh.size())
        part = PartOf(tuple(split.shape), placement.dim, first, mesh.get_group())
    assert part is not None
    places = list(torch.unravel_index(where.to(local.device), part.shape))
    places[part.dim] = places[part.dim] - part.first
    is_mine = (places[part.dim] >= 0) & (places[part.dim] < local.shape[part.dim])
    found = torch.zeros(len(where), dtype=local.dtype, device=local.device)
    if local.numel():
        found = torch.where(is_mine, local[tuple(place * is_mine for place in places)], found)
    # As bits, which the largest of one number and zeros leaves as they are: in floating point -0.0 would become 0.0.
    bits = found.view(torch.uint8).to(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, part.group)
    return bits.to(torch.uint8).view(local.dtype)


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a tensor, or of what it is a part of."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def is_split(tensor: torch.Tensor) -> bool:
    """Whether this process has a part of it only."""
    if part_of(tensor) is not None:
        return True
    split = split_tensor(tensor)
    if split is None or split.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in split.placements)


def part_of(tensor: torch.Tensor) -> PartOf | None:
    """Where an ordinary tensor lies in one that processes share, None of what is no part."""
    return getattr(tensor, "part_of", None)


def split_tensor(tensor: torch.Tensor) -> DTensor | None:
    """A tensor as one that processes share, None of an ordinary one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    # Here, as it takes long, and most programs are one process's.
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


_SAMPLES = 64


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """sha256 over every parameter's name, shape, dtype and 64 of its elements, evenly spread.

    Two models of one architecture agree only if these elements agree in every bit: other weights, another dtype or a
    quantised copy differ. It is no checksum of all the weights: for that a checkpoint's own is there.

    Args:
        model: On any device. Split over several processes, it has the name of the whole; all of them have to ask.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {whole_shape(parameter)} {parameter.dtype} ".encode())
        for sample in _samples(parameter):
            digest.update(sample.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _samples(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    size = math.prod(whole_shape(tensor))
    where = torch.linspace(0, size - 1, min(_SAMPLES, size), dtype=torch.float64).to(torch.int64)
    try:
        yield elements(tensor, where)
    except NotImplementedError:
        # Packed weights cannot be flattened: of the tensors that they are made of.
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _samples(getattr(tensor, name))
