"""Weights of a model: fingerprints, tensors that are split over processes, copies, and conversion to another dtype.

Conversion gives what `from_pretrained` would have loaded. `model.to(dtype)` would round more: the frequencies of RoPE,
whose error grows with the position, and tensors that a model computes with in float32, such as the biases of
DeepSeek V3's routers.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ..common.compat.transformers import float32_names
from ..parallel.ranks import PartOf, is_split, part_of, split_tensor, whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model over the same parameters, because a caller's model keeps its RoPE and its head."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


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


#: End of the names of buffers with frequencies of RoPE, which models compute in float32 and never store.
_FREQUENCIES = "inv_freq"


def keeps_float32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function from the name of a tensor of a model to True if it stays in float32 in a dtype."""
    names = [name.replace("*", ".*") for name in float32_names(model, dtype)]
    pattern = re.compile("|".join(names)) if names else None
    return lambda name: name.endswith(_FREQUENCIES) or (pattern is not None and pattern.search(name) is not None)


def _floats(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
    """Yield each tensor of floating-point numbers of a model, and the dtype that it gets."""
    keeps, is_loaded = keeps_float32(model, dtype), model.dtype == dtype
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            # A model that was loaded in the dtype has buffers in float32 where its class creates them so, such as the
            # biases of LFM2-MoE's routers, which it does not name.
            is_kept = is_loaded and not isinstance(tensor, torch.nn.Parameter)
            stays = tensor.dtype == torch.float32 and (is_kept or keeps(name))
            yield tensor, torch.float32 if stays else dtype


@torch.no_grad()
def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert a model to another dtype in place."""
    for tensor, wanted in _floats(model, dtype):
        tensor.data = tensor.data.to(wanted)


@torch.no_grad()
def converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model to another dtype without an intermediate copy in the original dtype."""
    memo: dict[int, Any] = {}
    for tensor, wanted in _floats(model, dtype):
        value = tensor.detach().to(wanted, copy=True)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    made = copy.deepcopy(model, memo)
    for config in {id(config): config for config in (made.config, made.config.get_text_config(decoder=True))}.values():
        config.dtype = dtype
    return made
