"""Interface of a slot policy: the slot of a token, the position in a slot, and the tokens that can be removed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from ..component import Component


class SlotPolicy(Component, ABC):
    """Interface of arithmetic on lengths: a policy holds numbers, no tensors, and gets every length as an argument.

    Members are frozen dataclasses of JSON fields. Lengths are int64 tensors, one per row, so no graph ever depends on
    how many tokens were seen, and the rows of a batch may differ.
    """

    family = "policy"
    kinds: ClassVar[dict[str, type[SlotPolicy]]] = {}

    #: True if a window hides older tokens, as transformers' `is_sliding`.
    is_sliding: ClassVar[bool] = False
    #: True if there are states of fixed size and no keys and values per token, as transformers' `Cache.is_linear`.
    is_linear: ClassVar[bool] = False
    #: True if nothing is kept, as transformers' `Cache.is_dummy`.
    is_dummy: ClassVar[bool] = False
    #: True if keys and values are kept per token.
    keeps_keys: ClassVar[bool] = True
    #: True if the layer's length is the decoder's, so that a step can provide it; False for cross-attention.
    follows_decoder: ClassVar[bool] = True
    #: True if a step of one token ends the prompt, so that a prompt must not be fed one token at a time.
    keeps_prompt: ClassVar[bool] = False
    #: Name of the state tensor that holds the lengths; None if nothing is counted.
    length_name: ClassVar[str | None] = "cumulative_length"
    #: Reason why `max_rollback` is limited, for messages.
    forgetting: ClassVar[str] = "the sliding window has overwritten older ones"

    if TYPE_CHECKING:
        # A field of some members, arithmetic on the fields of others.
        @property
        def capacity(self) -> int | None:
            """Number of slots; None without keys."""

    @property
    def slot_count(self) -> int:
        """Number of slots of a policy that keeps keys."""
        capacity = self.capacity
        assert capacity is not None
        return capacity

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Maximum number of tokens in a row, or None if unlimited."""

    @abstractmethod
    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """Return the number of newest tokens that can be removed while every key that is needed again still exists.

        Args:
            length: Tokens that the row holds now.
            max_len_ever: Most tokens that it held since it was empty: later tokens have overwritten slots.
        """

    def wraps(self, kv_read_len: int | None) -> bool:
        """Return True if a step may find slots that were reused; until then, slot `s` holds position `s`.

        Args:
            kv_read_len: See `StepContext`.
        """
        return False

    def slots_read(self, kv_read_len: int | None) -> int:
        """Return the number of slots that a step reads: all, or at most `kv_read_len`."""
        return self.slot_count if kv_read_len is None else min(kv_read_len, self.slot_count)

    def reads_up_to(self, kv_read_len: int | None) -> bool:
        """Return True if a step that leaves no row longer than this reads that many slots, in the order of positions.

        Args:
            kv_read_len: See `StepContext`. None, for a length that is unknown, gives False.
        """
        follows = self.keeps_keys and self.follows_decoder
        return follows and not self.wraps(kv_read_len) and self.slots_read(kv_read_len) == kv_read_len

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """Return the slot of the next token, int64 [batch_size], at `length` int64 [batch_size]."""
        return length

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of tokens at these positions, if no slot is reused: int64 of the same shape."""
        return positions

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """Return the position that each slot holds, negative for none: int64 [batch_size, capacity].

        Args:
            length: Tokens written, int64 [batch_size, 1].
        """
        slot = torch.arange(self.slot_count, device=length.device)
        return torch.where(slot < length, slot, -1)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """Return the absolute position of each key that attention gets for `query_length` new tokens.

        Args:
            length: Tokens held before the step, int64 [batch_size].
            query_length: New tokens.
            kv_read_len: See `StepContext`.

        Returns:
            int64 [batch_size, kv_length], or None if slot `s` holds position `s` in every row. An empty slot has
            a position past every query, so that any causal mask function excludes it. A policy that hides other
            keys from each query returns [batch_size, query_length, kv_length].
        """
        # Slots past the newest token count as later positions, which causal masks exclude.
        return None
