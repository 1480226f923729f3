"""A short name for a model's weights, so that state computed with them is not continued with others."""

from __future__ import annotations

import hashlib
import math

import torch

from .split_weights import elements, whole_shape

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
        shape = whole_shape(parameter)
        size = math.prod(shape)
        where = torch.linspace(0, size - 1, min(_SAMPLES, size), dtype=torch.float64).to(torch.int64)
        sample = elements(parameter, where).detach().cpu().contiguous()
        digest.update(f"{name} {shape} {parameter.dtype} ".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
