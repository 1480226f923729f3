"""What a method that encodes pictures or sound is made for, beside the pixels or samples of one item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Which tiles each token of a step sees, int64 [batch, items * tiles, length]: 1; or -1 where attention alone does, as
#: upstream has it of what comes before the first picture of a prompt.
ITEMS_SEEN = "items_seen"
#: States of all pictures that are held, [batch, items * slots, hidden_size], zeros behind them.
ITEM_STATES = "item_states"
#: What a processor says of the same, bool [batch, length, items, tiles].
CROSS_MASK = "cross_attention_mask"


@dataclass(frozen=True)
class FixedInput:
    """A tensor that goes with every item and never changes, such as its grid: a size, so the program is made for it.

    Attributes:
        dtype: Name of a torch dtype.
        shape: Of one item's.
        values: All of them in order, or the one that all have.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | bool | float, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FixedInput:
        """Of a tensor of any shape."""
        values = tuple(tensor.flatten().tolist())
        same = len(values) > 1 and len(set(values)) == 1
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values[:1] if same else values)

    def tensor(self) -> torch.Tensor:
        """The tensor [*shape], on the host."""
        return torch.tensor(self.values, dtype=getattr(torch, self.dtype)).expand(self.numel).reshape(self.shape)

    @property
    def numel(self) -> int:
        """Of its values."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ItemFacts:
    """What a session has to know of the items that an `encode_image`, `encode_video` or `encode_audio` takes.

    Attributes:
        token_id: Of the placeholders in a prompt, one per embedding.
        fixed: What goes with the item, by the name that the processor gives it.
        positions: Rotary positions of its tokens on each axis, [axes][tokens], counted from where it starts; empty
            where they count on by one as text does.
        advance: Positions from where it starts to the token behind it, where `positions` are given.
        sees: What tokens see beyond what came before: "item" for the tokens of their item, "sliding item" for these in
            layers of sliding attention only, "prompt" for those of the whole prompt, "" for nothing.
        tiles: Parts of an item that a token sees or does not, where layers of cross-attention see items; 0 where
            embeddings take the places of placeholders.
        apart: Whether frames of a video lie apart in a prompt: a grid of several frames is so many items of one.
    """

    token_id: int
    fixed: Mapping[str, FixedInput] = field(default_factory=dict)
    positions: tuple[tuple[int, ...], ...] = ()
    advance: int = 0
    sees: str = ""
    apart: bool = False
    tiles: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "token_id": self.token_id,
            "fixed": {
                name: {"dtype": one.dtype, "shape": list(one.shape), "values": list(one.values)}
                for name, one in self.fixed.items()
            },
            "positions": [list(axis) for axis in self.positions],
            "advance": self.advance,
            "sees": self.sees,
            "apart": self.apart,
            "tiles": self.tiles,
        }
