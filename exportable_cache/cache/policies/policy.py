"""The interface of a slot policy: which slot a token goes to, which position a slot holds, what can be taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from ..component import Component


class SlotPolicy(Component, ABC):
    """Arithmetic on lengths, and nothing else: a policy holds numbers, no tensors, and is told every length.

    Members are frozen dataclasses of JSON fields. Lengths are int64 tensors, one per row, so no graph ever depends on
    how many tokens were seen, and the rows of a batch may differ.
    """

    family = "policy"
    kinds: ClassVar[dict[str, type[SlotPolicy]]] = {}

    #: Whether a window hides older tokens, as transformers' `is_sliding`.
    is_sliding: ClassVar[bool] = False
    #: Whether there are states of fixed size and no keys and values per token, as transformers' `Cache.is_linear`.
    is_linear: ClassVar[bool] = False
    #: Whether nothing is kept, as transformers' `Cache.is_dummy`.
    is_dummy: ClassVar[bool] = False
    #: Whether keys and values are kept per token.
    keeps_keys: ClassVar[bool] = True
    #: Whether the length is the decoder's: a step may say what it is. Not of cross-attention.
    follows_decoder: ClassVar[bool] = True
    #: Whether a step of one token ends the prompt, so that none of a prompt may come alone after its first.
    keeps_prompt: ClassVar[bool] = False
    #: State tensor that holds the lengths; None where nothing is counted.
    length_name: ClassVar[str | None] = "cumulative_length"
    #: Why `max_rollback` is less than all, for messages.
    forgetting: ClassVar[str] = "the sliding window has overwritten older ones"

    if TYPE_CHECKING:
        # A field of some members, arithmetic on the fields of others.
        @property
        def capacity(self) -> int | None:
            """Slots; None where there are no keys."""

    @property
    def slot_count(self) -> int:
        """Number of slots, of a policy that keeps keys."""
        capacity = self.capacity
        assert capacity is not None
        return capacity

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Tokens a row can hold in all, or None where any number may be seen."""

    @abstractmethod
    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """How many of the newest tokens can be taken back without having lost one that is still needed.

        Args:
            length: Tokens the row holds now.
            max_len_ever: The most tokens it ever held since it was empty: what came after `length` was overwritten.
        """

    def wraps(self, kv_read_len: int | None) -> bool:
        """Whether a step may find slots written a second time; until then, slot `s` holds position `s`.

        Args:
            kv_read_len: See `StepContext`.
        """
        return False

    def slots_read(self, kv_read_len: int | None) -> int:
        """Slots that a step looks at: all, or as many as `kv_read_len` leaves of them."""
        return self.slot_count if kv_read_len is None else min(kv_read_len, self.slot_count)

    def reads_up_to(self, kv_read_len: int | None) -> bool:
        """Return True if a step that leaves no row longer than this looks at that many slots, each of its own position.

        Args:
            kv_read_len: See `StepContext`. None, for a length that is unknown, gives False.
        """
        follows = self.keeps_keys and self.follows_decoder
        return follows and not self.wraps(kv_read_len) and self.slots_read(kv_read_len) == kv_read_len

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """Slot of the next token, int64 [batch_size], at `length` int64 [batch_size]."""
        return length

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of tokens at these positions, where no slot is written twice: int64 of the same shape."""
        return positions

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """Position that each slot holds, negative for none: int64 [batch_size, capacity].

        Args:
            length: Tokens written, int64 [batch_size, 1].
        """
        slot = torch.arange(self.slot_count, device=length.device)
        return torch.where(slot < length, slot, -1)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """Absolute position of each key that attention gets for `query_length` new tokens.

        Args:
            length: Tokens held before the step, int64 [batch_size].
            query_length: New tokens.
            kv_read_len: See `StepContext`.

        Returns:
            int64 [batch_size, kv_length], or None where slot `s` holds position `s` in every row. An empty slot is
            given a position past every query, so that any causal mask function excludes it. A policy that hides other
            keys from each query returns [batch_size, query_length, kv_length].
        """
        # Slots past the newest token count as later positions, which causal masks exclude.
        return None
