"""The slots of full layers over several processes: each attends to its own, and the parts of the softmax are merged.

A layer leaves word of its keys for the attention function behind it, which finds by their number that they are a part.
Keys that another function takes are refused: without the merge a step would see a part of the tokens. Models that make
keys of latents do that slot by slot, and may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.compat.torch_distributed import reduced
from ..errors import UnsupportedModelError
from .layout import PortableLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .layers import CacheLayer

#: Said where attention would see one rank's slots alone.
UNSEEN = (
    "a layer's slots are split over ranks, and the model hands its keys to attention that is not this package's, or "
    "others beside them; allocate the cache without split_context"
)


class ContextRanks:
    """The processes that the tokens of a row are split over.

    Args:
        group: All of them.
        rank: This one.
        size: How many there are.
    """

    def __init__(self, group: ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    # Copies of a layer share it: a group of processes is not copied.
    def __deepcopy__(self, memo: dict[int, Any]) -> ContextRanks:
        return self

    def attended(self, scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """What attention gives over the slots of all ranks, by two collectives: the largest scores, then the sums.

        Args:
            scores: Of this rank's slots, [..., q_length, slots], masked ones at the lowest finite value.
            values: [..., slots, value_head_dim].
            sinks: Further scores under the softmax, [..., q_length, 1], the same on every rank.

        Returns:
            [..., q_length, value_head_dim] float32, the same on every rank.
        """
        scores, values = scores.float(), values.float()
        largest = reduced(scores.amax(-1, keepdim=True), "max", self.group)
        if sinks is not None:
            largest = torch.maximum(largest, sinks.float())
        weights = torch.exp(scores - largest)
        parts = torch.cat([weights @ values, weights.sum(-1, keepdim=True)], dim=-1)
        sums = reduced(parts, "sum", self.group)
        total = sums[..., -1:]
        if sinks is not None:
            total = total + torch.exp(sinks.float() - largest)
        return sums[..., :-1] / total


@dataclass
class _Awaited:
    """Keys on their way from a layer to attention: of how many rows and slots, from which layer, over which ranks.

    One for the process, and not one for a thread: what ranks send each other has one order. Compiled steps write it
    while they are traced.
    """

    rows: int = 0
    slots: int = 0
    place: int = 0
    ranks: ContextRanks | None = None


_awaited = _Awaited()


def taken(keys: torch.Tensor) -> ContextRanks | None:
    """The ranks that these keys [batch, kv_heads, slots, dim] are a part on, None of keys that are whole; to be asked
    by attention, once.

    Raises:
        UnsupportedModelError: If keys that are a part are awaited, and these are others.
    """
    ranks = _awaited.ranks
    if ranks is None:
        return None
    _awaited.ranks = None
    if (keys.shape[0], keys.shape[2]) != (_awaited.rows, _awaited.slots):
        raise UnsupportedModelError(UNSEEN)
    return ranks


def check_taken() -> None:
    """Refuse a step whose attention has left keys of a part.

    Raises:
        UnsupportedModelError: Then.
    """
    if _awaited.ranks is not None:
        _awaited.ranks = None
        raise UnsupportedModelError(UNSEEN)


@dataclass(frozen=True)
class SplitLayout(PortableLayout, kind="split"):
    """The portable kernel for a layer that has a part of the slots."""

    def mask_positions(self, layer: CacheLayer, query_length: int) -> torch.Tensor | None:
        """See `Layout.mask_positions`. Masks come before layers: what is left then is of a step that failed."""
        _awaited.ranks = None
        return super().mask_positions(layer, query_length)

    def update(
        self, layer: CacheLayer, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Of a layer before this one; one of this layer or behind it is what a step that failed has left.
        if _awaited.place < layer.place:
            check_taken()
        keys, values = super().update(layer, key_states, value_states)
        _awaited.rows, _awaited.slots, _awaited.place = keys.shape[0], keys.shape[2], layer.place
        _awaited.ranks = layer.over
        return keys, values


SPLIT = SplitLayout()
