"""What the parts of an input have in common: each turns what a user gives of its kind into what steps take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..token_rows import TokenRows
    from .image_places import PlacedImages


@dataclass(frozen=True)
class Prompt:
    """What is fed, checked but for what depends on where the session is.

    Attributes:
        rows: Its token ids.
        items: What encoders are to be given for it, item by item, by name of the method.
    """

    rows: TokenRows
    items: Mapping[str, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """A prompt as the steps take it.

    Attributes:
        fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
        rows: Where each row's tokens are.
        sizes: Tokens of each step, where that is not free.
        further: What steps take besides, by name of the input, [..., length].
        first: What the first step takes besides, by name of the input.
        placed: Where its images are, counted from its first token, their rotary offset from there.
    """

    fed: torch.Tensor
    rows: TokenRows
    sizes: Sequence[int] | None = None
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)
    first: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None

    @property
    def are_ids(self) -> bool:
        """Whether tokens are fed by id."""
        return not self.fed.is_floating_point()
