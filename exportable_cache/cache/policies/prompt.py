"""Policy of reference sliding windows: the whole prompt, and a window of later tokens (Unlimited OCR)."""

from __future__ import annotations

from dataclasses import dataclass

from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class PromptPolicy(SlotPolicy, kind="prompt"):
    """Policy that keeps up to `capacity` tokens per row; the slot is the position, and a mask applies the window.

    The layer keeps the length of the prompt in a tensor, see `layers.PromptLayer`.

    Attributes:
        capacity: Maximum number of tokens, prompt included.
        window: Tokens after the prompt that a query attends to, itself included.

    Raises:
        InputError: If a number is not a positive int.
    """

    capacity: int
    window: int

    is_sliding = False
    keeps_prompt = True
    forgetting = "the prompt's length is not kept for shorter texts"

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a prompt policy", 1)
        check_count(self.window, "window of a prompt policy", 1)

    @property
    def max_length(self) -> int:
        """See `SlotPolicy.max_length`."""
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        # Not supported, because the end of the prompt could be after the last token.
        return 0
