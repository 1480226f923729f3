"""A short name for a model's weights, so that state computed with them is not continued with others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from ..split_weights import elements, whole_shape

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
