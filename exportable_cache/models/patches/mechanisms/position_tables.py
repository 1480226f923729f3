"""BLIP, MVP, RoFormer and TrOCR: their position tables look up `arange(past, past + n)`, whose length depends on data.

The tables of MusicGen grow if a position is beyond them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from ....common.patch import Patch
from ..conditions import only_traced

if TYPE_CHECKING:
    from torch import nn


def _positions(
    self: nn.Embedding,
    ids_or_shape: torch.Tensor | torch.Size,
    cache_length: int | torch.Tensor = 0,
    position_ids: torch.Tensor | None = None,
    *,
    original: Callable,
) -> torch.Tensor:
    """Compute positions as `past + arange(n)`. Some tables get ids, others the shape [batch, length]."""
    if position_ids is None:
        shape = ids_or_shape.shape if isinstance(ids_or_shape, torch.Tensor) else ids_or_shape
        position_ids = cache_length + torch.arange(shape[1], device=self.weight.device)
    return original(self, ids_or_shape, cache_length, position_ids)


def _sinusoids_of_ids(
    self: nn.Module, ids: torch.Tensor, cache_length: int | torch.Tensor = 0, *, original: Callable
) -> torch.Tensor:
    """Compute the sinusoids of MusicGen for ids [batch, codebooks, length]."""
    return _sinusoids(self, ids.shape[2], cache_length)


def _sinusoids_of_embeddings(
    self: nn.Module, embeds: torch.Tensor, cache_length: int | torch.Tensor = 0, *, original: Callable
) -> torch.Tensor:
    """Compute the sinusoids of MusicGen Melody for embeddings [batch, length, hidden_size]."""
    return _sinusoids(self, embeds.shape[1], cache_length)


def _sinusoids(table: Any, length: int, past: int | torch.Tensor) -> torch.Tensor:
    """Compute sinusoids [length, hidden_size] as `get_embedding`, because a table would have to grow with data."""
    half = table.embedding_dim // 2
    indices = torch.arange(half, dtype=torch.int64, device=table.weights.device).float()
    rates = torch.exp(indices * -(math.log(10000) / (half - 1)))
    angles = (past + torch.arange(length, device=rates.device)).float()[:, None] * rates
    sinusoids = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)
    return F.pad(sinusoids, (0, table.embedding_dim % 2)).to(table.weights.dtype)


_REASON = "the number of positions that it looks up depends on data"


def _of_class(model: str, name: str, *digests: str) -> tuple[Patch, ...]:
    return (Patch(f"{model}.modeling_{model}", f"{name}.forward", only_traced(_positions), _REASON, digests),)


_GROWS = "its position table grows with the sequence length, which depends on data"
_MUSICGEN = Patch(
    "musicgen.modeling_musicgen",
    "MusicgenSinusoidalPositionalEmbedding.forward",
    only_traced(_sinusoids_of_ids),
    _GROWS,
    ("44fbf25110d45e36", "5f91b419b3cd9a70", "9681c4a853c4269c"),
)
_MUSICGEN_MELODY = Patch(
    "musicgen_melody.modeling_musicgen_melody",
    "MusicgenMelodySinusoidalPositionalEmbedding.forward",
    only_traced(_sinusoids_of_embeddings),
    _GROWS,
    ("93e35d962506760e", "4851571b68c820dc", "4536156f7176c154"),
)


def _positions_of_blip(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    cache_length: int | torch.Tensor = 0,
    *,
    original: Callable,
) -> torch.Tensor:
    """Compute positions as `past + arange(n)`, where BLIP takes a slice of a table from `past` on."""
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    if position_ids is None and tokens is not None:
        position_ids = cache_length + torch.arange(tokens.shape[1], device=tokens.device)[None]
    return original(self, input_ids, position_ids, inputs_embeds)


_BLIP = Patch(
    "blip.modeling_blip_text",
    "BlipTextEmbeddings.forward",
    only_traced(_positions_of_blip),
    _REASON,
    ("97492eeb4c55da6e", "8ad065a8bc3a7db3", "6e4ffd1201cc883b"),
)

PATCHES = {
    "blip_text_model": (_BLIP,),
    "musicgen_decoder": (_MUSICGEN,),
    "musicgen_melody_decoder": (_MUSICGEN_MELODY,),
    "mvp": _of_class("mvp", "MvpLearnedPositionalEmbedding", "ff0289e389da4468", "f2a49c32b6139e67"),
    "roformer": _of_class("roformer", "RoFormerSinusoidalPositionalEmbedding", "bd1ac856484b48d1", "6e97d62c4f1ba410"),
    "trocr": _of_class("trocr", "TrOCRLearnedPositionalEmbedding", "ff0289e389da4468", "f2a49c32b6139e67"),
}
