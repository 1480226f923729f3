"""Weights of a model: their fingerprint, and tensors that are split over processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import distributed as dist

from ..parallel.ranks import PartOf, is_split, part_of, split_tensor, whole_shape


def elements(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return elements of a tensor, [count], by their indices in the whole tensor, flattened.

    Args:
        tensor: A tensor of any shape. If it is split over processes, all of them must call this.
        where: Indices, int64 [count], on the CPU.
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
            # Packed weights are split into interleaved parts.
            return split.full_tensor().flatten()[where.to(local.device)]
        # As torch splits: equal parts, except the last ones.
        first = mesh.get_local_rank() * -(-split.shape[placement.dim] // mesh.size())
        part = PartOf(tuple(split.shape), placement.dim, first, mesh.get_group())
    assert part is not None
    indices = list(torch.unravel_index(where.to(local.device), part.shape))
    indices[part.dim] = indices[part.dim] - part.first
    is_mine = (indices[part.dim] >= 0) & (indices[part.dim] < local.shape[part.dim])
    found = torch.zeros(len(where), dtype=local.dtype, device=local.device)
    if local.numel():
        found = torch.where(is_mine, local[tuple(index * is_mine for index in indices)], found)
    # Reduced as bytes, because a maximum over floating-point numbers would turn -0.0 into 0.0.
    bits = found.view(torch.uint8).to(torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.MAX, part.group)
    return bits.to(torch.uint8).view(local.dtype)


_SAMPLES = 64


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of every parameter's name, shape, dtype and 64 evenly spaced elements.

    It identifies the weights that a saved state was computed with: other weights, another dtype or a quantised copy
    give another fingerprint. It is not a checksum of all weights.

    Args:
        model: A model on any device. If it is split over processes, all of them must call this, and get the fingerprint
            of the whole model.
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
        # Packed weights cannot be flattened, so the tensors inside them are sampled.
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _samples(getattr(tensor, name))
