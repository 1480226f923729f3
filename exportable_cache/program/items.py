"""Facts about the images, videos and audio clips ("items") that an `encode_*` method takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Tiles that each token of a step attends to, int64 [batch, items * tiles, length]: 1 where it does, -1 for tokens
#: before the first image of a prompt.
ITEMS_SEEN = "items_seen"
#: States of all cached images, [batch, items * slots, hidden_size], padded with zeros.
ITEM_STATES = "item_states"
#: The processor's form of `ITEMS_SEEN`, bool [batch, length, items, tiles].
CROSS_MASK = "cross_attention_mask"


@dataclass(frozen=True)
class FixedInput:
    """A tensor that is equal for every item, such as its grid. It determines sizes, so it is part of the program.

    Attributes:
        dtype: Name of a torch dtype.
        shape: Shape for one item.
        values: All elements in order, or a single one if all are equal.
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int | bool | float, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FixedInput:
        """Store the values of a tensor of any shape."""
        values = tuple(tensor.flatten().tolist())
        same = len(values) > 1 and len(set(values)) == 1
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values[:1] if same else values)

    def tensor(self) -> torch.Tensor:
        """Return the tensor [*shape], on the CPU. It is contiguous, because ExecuTorch lifts no other constants."""
        values = torch.tensor(self.values, dtype=getattr(torch, self.dtype))
        return values.expand(self.numel).reshape(self.shape).contiguous()

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ItemFacts:
    """Facts that a session needs to insert items of an `encode_*` method into a prompt.

    Attributes:
        token_id: Id of the placeholder token; a prompt has one per embedding.
        fixed: Constant inputs of the encoder, by the processor's name.
        positions: Rotary positions of an item's tokens on each axis, [axes][tokens], relative to its start; empty if
            they increase by one like those of text.
        advance: Offset from an item's start to the position of the token after it, if `positions` is not empty.
        sees: What an item's tokens attend to besides earlier tokens: "item" for the tokens of the same item, "sliding
            item" for these in sliding-attention layers only, "whole item" for these also beyond a sliding window,
            "items" for those of all items of the prompt, "prompt" for the whole prompt, "" for nothing.
        tiles: Tiles per item that cross-attention masks separately; 0 if embeddings replace placeholders instead.
        apart: True if the frames of a video are separate items of one frame in a prompt.
        tokens: Placeholders of one item, for the method `encode` of an encoder-decoder; 0 for methods that return
            the embeddings.
    """

    token_id: int
    fixed: Mapping[str, FixedInput] = field(default_factory=dict)
    positions: tuple[tuple[int, ...], ...] = ()
    advance: int = 0
    sees: str = ""
    apart: bool = False
    tiles: int = 0
    tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
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
            **({"tokens": self.tokens} if self.tokens else {}),
        }


@dataclass(frozen=True)
class ExtraFeature:
    """Features of each token that a decoder takes in addition to the embeddings.

    Attributes:
        name: Name of the decoder's argument.
        keys: Indices or layer numbers of its tensors if it is a list or dict; empty for a single tensor.
        size: Values per token, over all tensors.
        mask: Argument with the mask of the tokens that have them, if not all do.
        shape: Shape for one token, if it is a single tensor.
        of_text: True if text tokens have them too.
    """

    name: str
    keys: tuple[int, ...]
    size: int
    mask: str = ""
    shape: tuple[int, ...] = ()
    of_text: bool = False

    def tensors(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return its tensors [tokens, size] from a decoder's arguments for one prompt."""
        value = given[self.name]
        if not self.keys:
            return [value[0].flatten(1)]
        return [value[key].reshape(-1, value[key].shape[-1]) for key in self.keys]
