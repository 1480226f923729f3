"""Cross-attention: the keys and values of one encoder output, written once per sequence and read by every step."""

from __future__ import annotations

from dataclasses import dataclass

from ..component import check_count
from .policy import SlotPolicy


@dataclass(frozen=True)
class CrossPolicy(SlotPolicy, kind="cross"):
    """Keeps up to `capacity` encoder positions per row, from slot 0 on; how many are real is a length of its own.

    Decoder tokens do not move it: rolling the decoder back leaves it alone, and a new encoder output is written over
    the old one.

    Raises:
        InputError: If `capacity`, the longest encoder output, is not a positive int.
    """

    capacity: int

    follows_decoder = False
    length_name = "encoder_length"

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a cross policy", 1)

    @property
    def max_length(self) -> None:
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length
