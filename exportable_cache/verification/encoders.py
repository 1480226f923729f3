"""Checking the methods that turn an image or a piece of sound into embeddings: the same item through them and through
the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.attention.implementation import attention_of
from ..program.inputs.grid import grid_constants
from ..program.inputs.modality import AUDIO, IMAGE, features_of
from .report import VerifiedEncoder
from .tolerance import default_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..session.session import Session

_ITEMS = 2


@torch.no_grad()
def verify_encoders(
    session: Session, model: PreTrainedModel, generator: torch.Generator, tolerance: float | None = None
) -> tuple[VerifiedEncoder, ...]:
    """Compare each `encode_image` and `encode_audio` of a session with the model's own encoder in eager attention.

    Args:
        session: What to check; nothing in its cache changes.
        model: What it was made from.
        generator: Of the items.
        tolerance: Largest |difference| that passes where that is more than `default_tolerance` for the largest value:
            of quantised weights.
    """
    verified = []
    for kind in (IMAGE, AUDIO):
        method = session.runner.methods.get(f"encode_{kind}")
        if method is None:
            continue
        (spec,) = method.inputs
        constants = {} if method.grid is None else grid_constants(model, method.grid)
        differences, largest = [], 0.0
        for _ in range(_ITEMS):
            item = torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
            with attention_of(model, "eager"):
                expected = features_of(model, kind, constants, **{spec.name: item.to(model.device)}).float().clone()
            found = session.runner.run(method.name, item.to(session.device))[0].float().to(expected.device)
            differences.append((found - expected).abs().max())
            largest = max(largest, expected.abs().max().item())
        limit = max(default_tolerance(model.dtype, largest), tolerance or 0.0)
        verified.append(VerifiedEncoder(method.name, torch.stack(differences).max().item(), limit))
    return tuple(verified)
