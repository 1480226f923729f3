"""Checking the methods that turn an image or a piece of sound into embeddings: the same item through them and through
the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.attention.implementation import attention_of
from ..program.inputs.modalities import modalities_of
from ..program.inputs.modality import KINDS, features_of
from .report import VerifiedEncoder
from .tolerance import default_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..common.tensor_spec import TensorSpec
    from ..program.methods import ProgramMethod
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
    for kind in KINDS:
        method = session.runner.methods.get(f"encode_{kind}")
        if method is None:
            continue
        (modality,) = modalities_of(model, {kind: _example(method)})
        differences, largest = [], 0.0
        for _ in range(_ITEMS):
            item = [_random(spec, generator) for spec in method.inputs]
            with attention_of(model, "eager"):
                given = [tensor.to(model.device) for tensor in item]
                expected = features_of(model, modality, *given).float().clone()
            found = session.runner.run(method.name, *(tensor.to(session.device) for tensor in item))[0]
            differences.append((found.float().to(expected.device) - expected).abs().max())
            largest = max(largest, expected.abs().max().item())
        limit = max(default_tolerance(model.dtype, largest), tolerance or 0.0)
        verified.append(VerifiedEncoder(method.name, torch.stack(differences).max().item(), limit))
    return tuple(verified)


def _example(method: ProgramMethod) -> dict[str, torch.Tensor]:
    """An item of the sizes that a method was made for."""
    fixed = {} if method.item is None else {name: one.tensor() for name, one in method.item.fixed.items()}
    if method.grid is not None:
        # All that bundles from before say.
        fixed.setdefault("image_grid_thw", torch.tensor([method.grid]))
    return {**{spec.name: _random(spec) for spec in method.inputs}, **fixed}


def _random(spec: TensorSpec, generator: torch.Generator | None = None) -> torch.Tensor:
    """Pixels or samples; of what is counted, the first that there is: 0 stands for none."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.ones(spec.shape, dtype=dtype)
    return torch.randn(spec.shape, generator=generator).to(dtype)
