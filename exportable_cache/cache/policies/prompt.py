"""Reference sliding windows: the whole prompt, and a window of what follows it (Unlimited OCR)."""

from __future__ import annotations

from dataclasses import dataclass

from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class PromptPolicy(SlotPolicy, kind="prompt"):
    """Keeps up to `capacity` tokens per row; the slot is the position, and a mask hides what no window reaches.

    Where the prompt ended is a tensor of the layer, see `layers.PromptLayer`.

    Attributes:
        capacity: Tokens of the prompt and of what follows it.
        window: Tokens after the prompt that a query attends to, itself included.

    Raises:
        InputError: If a number is not a positive int.
    """

    capacity: int
    window: int

    is_sliding = False
    keeps_prompt = True
    forgetting = "where the prompt ended is not kept for shorter texts"

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a prompt policy", 1)
        check_count(self.window, "window of a prompt policy", 1)

    @property
    def max_length(self) -> int:
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        # The end of the prompt would stand behind what is left of it.
        return 0
