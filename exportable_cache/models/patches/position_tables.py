"""MVP, RoFormer and TrOCR: their position tables look up `arange(past, past + n)`, whose length depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .conditions import only_traced
from .patch import Patch

if TYPE_CHECKING:
    from torch import nn


def _positions(
    self: nn.Embedding,
    ids_or_shape: torch.Tensor | torch.Size,
    past_key_values_length: int | torch.Tensor = 0,
    position_ids: torch.Tensor | None = None,
    *,
    original: Callable,
) -> torch.Tensor:
    """Positions as `past + arange(n)`, n being a size. Some tables are given ids, some their shape [batch, length]."""
    if position_ids is None:
        shape = ids_or_shape.shape if isinstance(ids_or_shape, torch.Tensor) else ids_or_shape
        position_ids = past_key_values_length + torch.arange(shape[1], device=self.weight.device)
    return original(self, ids_or_shape, past_key_values_length, position_ids)


_REASON = "its position table looks up a number of positions that depends on data"


def _of_class(model: str, name: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(f"{model}.modeling_{model}", f"{name}.forward", only_traced(_positions), _REASON, digests),)


PATCHES = {
    "mvp": _of_class("mvp", "MvpLearnedPositionalEmbedding", "ff0289e389da4468"),
    "roformer": _of_class("roformer", "RoFormerSinusoidalPositionalEmbedding", "bd1ac856484b48d1"),
    "trocr": _of_class("trocr", "TrOCRLearnedPositionalEmbedding", "ff0289e389da4468"),
}
