"""Seamless M4T: its encoder shifts relative scores by reshaping to rows of other lengths, and ExecuTorch (1.4.1) plans
memory for one size of these and asks for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....common.patch import Patch
from ..conditions import only_traced


def _relative_scores(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    relative_position_embeddings: torch.Tensor,
    *,
    original: Callable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dai et al. 2019, arXiv:1901.02860, appendix B, where each score is looked up by its distance.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, heads, length, head_dim].
        relative_position_embeddings: [1, 2 * length - 1, hidden], from the farthest earlier position to the farthest
            later one.

    Returns:
        The query for scores by content, and scores by distance [batch, heads, length, length].
    """
    length = query.shape[2]
    embeddings = self.linear_pos(relative_position_embeddings)
    embeddings = embeddings.reshape(*relative_position_embeddings.shape[:2], -1, self.head_size).permute(0, 2, 3, 1)
    scores = torch.matmul(query + self.pos_bias_v[None, :, None, :], embeddings)
    at = torch.arange(length, device=query.device)
    distance = length - 1 - at[:, None] + at[None, :]
    scores = torch.gather(scores, -1, distance.expand(*scores.shape[:2], length, length))
    return query + self.pos_bias_u[None, :, None, :], scores * self.scaling


PATCHES = {
    "seamless_m4t": (
        Patch(
            "seamless_m4t.modeling_seamless_m4t",
            "_apply_relative_position_encoding",
            only_traced(_relative_scores),
            "it shifts relative scores by reshaping rows of other lengths",
            digests=("a1c4ee739337d77d",),
            needed=False,
        ),
    )
}
