"""A short name for a model's weights, so that state computed with them is not continued with others."""

from __future__ import annotations

import hashlib

import torch

from .split_weights import elements

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
        count = min(_SAMPLES, parameter.numel())
        where = torch.linspace(0, parameter.numel() - 1, count, dtype=torch.float64).to(torch.int64)
        sample = elements(parameter.detach(), where).cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
