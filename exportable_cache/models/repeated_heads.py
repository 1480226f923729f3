"""Fewer key and value heads than ranks: each head is kept by several ranks, whose queries it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..common.compat.transformers import is_split_by_transformers
from .split_weights import PartOf, part_of, split_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .ranks import Ranks

_PROJECTIONS = ("k_proj", "v_proj")


@torch.no_grad()
def repeat_heads(model: PreTrainedModel, ranks: Ranks) -> None:
    """Give each rank the whole of the key and value head that its queries meet, where ranks have cut through heads.

    Transformers cuts the rows of these projections into equal parts, whatever a head is: with two heads of 64 over four
    ranks each has half a head, and the model does not run. Its weights are changed in place, once; a model whose heads
    divide is left alone, and so is one that ranks do not divide either.

    Args:
        model: Split by transformers' own plan.
        ranks: The processes, all of which have to call this.
    """
    for module in model.modules():
        head_dim = getattr(module, "head_dim", None)
        projections = [getattr(module, name, None) for name in _PROJECTIONS]
        if not isinstance(head_dim, int) or not all(
            isinstance(one, nn.Linear) and is_split_by_transformers(one) for one in projections
        ):
            continue
        rows = projections[0].weight.shape[0]  # type: ignore[union-attr]
        heads = rows // head_dim
        if rows % head_dim or heads == 0 or heads % ranks.size == 0 or ranks.size % heads:
            continue
        for projection in projections:
            assert projection is not None
            _take_head(projection, heads, ranks)


def _take_head(projection: nn.Module, heads: int, ranks: Ranks) -> None:
    for name, parameter in list(projection.named_parameters(recurse=False)):
        split = split_tensor(parameter)
        if split is None or part_of(parameter) is not None:
            continue
        size = split.shape[0] // heads
        first = ranks.rank // (ranks.size // heads) * size
        own = nn.Parameter(split.full_tensor()[first : first + size].clone(), requires_grad=False)
        own.part_of = PartOf(tuple(split.shape), 0, first, ranks.group)  # type: ignore[attr-defined]
        setattr(projection, name, own)
