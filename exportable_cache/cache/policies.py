"""Slot policies: the slot of a new token, the position that each slot holds, and the tokens that can be removed.

Attention sinks are those of StreamingLLM (Xiao et al., 2023, arXiv:2309.17453), which keeps the first few tokens in
addition to a sliding window, because models put much of their attention there and degrade when a plain window drops
them. That paper also renumbers positions within the cache. Here every key keeps its position in the text, because a
layer gets keys after the rotary embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import InputError
from .component import Component, check_count
from .slots import aligned_positions


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


@dataclass(frozen=True)
class FullPolicy(SlotPolicy, kind="full"):
    """Policy that keeps up to `capacity` tokens per row; the slot is the position.

    Raises:
        InputError: If `capacity` is not a positive int.
    """

    capacity: int

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a full policy", 1)

    @property
    def max_length(self) -> int:
        """See `SlotPolicy.max_length`."""
        return self.capacity

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length


class UnchangedPolicy(SlotPolicy):
    """Policy of a layer that the decoder's tokens do not change: their number has no limit, and all can be removed."""

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length


@dataclass(frozen=True)
class NoPolicy(UnchangedPolicy, kind="none"):
    """Policy of a decoder layer without state, so that every decoder layer has its index in the cache.

    Gemma 3n and Gemma 4 pass the keys and values of an earlier layer on inside the step, so the layers that reuse them
    need no storage; layers that are only an MLP (Nemotron-H) need none either. Transformers' type for both is "dummy".
    """

    is_dummy = True
    keeps_keys = False
    length_name = None
    capacity = None


@dataclass(frozen=True)
class RecurrentPolicy(SlotPolicy, kind="recurrent"):
    """Policy without slots: a state of fixed size sums up every token, so no token can be removed.

    A layer that also keeps keys and values has their policy instead; see `layers.linear.LinearLayer`.
    """

    is_linear = True
    keeps_keys = False
    capacity = None
    forgetting = "a layer's state sums up all tokens"

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        # What the state was before the newest token is gone.
        return 0


class CircularPolicy(SlotPolicy):
    """Policy that keeps the newest tokens in slots that are reused, without a limit of length."""

    window: int
    rollback_slots: int

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    @property
    @abstractmethod
    def ring(self) -> int:
        """Number of slots that are reused."""

    @property
    @abstractmethod
    def first_round(self) -> int:
        """Length up to which slot `s` holds position `s` and every token is visible."""

    def wraps(self, kv_read_len: int | None) -> bool:
        """See `SlotPolicy.wraps`."""
        return kv_read_len is None or kv_read_len > self.first_round

    if TYPE_CHECKING:

        @property
        def capacity(self) -> int:
            """See `SlotPolicy.capacity`."""

    @abstractmethod
    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""

    @abstractmethod
    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        if max_len_ever <= self.capacity:
            return length
        # Past the sinks, slots of positions up to max_len_ever - 1 - ring hold later tokens; the next query needs those
        # from its own position - window + 1 on.
        return max(0, min(length, length - (max_len_ever - 1 - self.ring + self.window)))


def is_one(query_length: int) -> bool:
    """Return True if the step has a static length of one token: a decode step."""
    # A symbolic length of torch.export may be 1 as well: it takes the general path, which is exact for any length.
    return isinstance(query_length, int) and query_length == 1


@dataclass(frozen=True)
class RingPolicy(CircularPolicy, kind="ring"):
    """Policy that keeps the newest `window + rollback_slots` tokens per row; position `p` is in slot `p % capacity`.

    With n tokens seen, slot s holds position `n - 1 - (n - 1 - s) % capacity`, negative meaning empty. No number
    of tokens and no prompt length is a special case, so one graph serves them all. An attention chunk is kept in a
    ring as well: the model's mask function decides which of its keys a query sees.

    Attributes:
        window: Tokens a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be removed past the window.

    Raises:
        InputError: If `window` is not a positive int or `rollback_slots` a negative one.
    """

    window: int
    rollback_slots: int = 0

    is_sliding = True

    def __post_init__(self) -> None:
        check_count(self.window, "window of a ring", 1)
        check_count(self.rollback_slots, "rollback_slots of a ring", 0)

    @property
    def capacity(self) -> int:
        """See `SlotPolicy.capacity`."""
        return self.window + self.rollback_slots

    @property
    def ring(self) -> int:
        """See `SlotPolicy.ring`."""
        return self.capacity

    @property
    def first_round(self) -> int:
        """See `SlotPolicy.first_round`."""
        return self.capacity

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""
        return torch.remainder(length, self.capacity)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # `newest - slot` may be as low as -capacity. One capacity is added, because
        # ExecuTorch's integer remainder has the dividend's sign, and torch's the divisor's.
        return newest - torch.remainder(newest - slot + self.capacity, self.capacity)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`."""
        if not self.wraps(kv_read_len):
            return None
        if not is_one(query_length):
            return self.positions_beside_new(length, query_length)
        after = length[:, None] + 1
        positions = self.positions(after)
        return torch.where(positions < 0, after, positions)

    def positions_beside_new(self, length: torch.Tensor, query_length: int) -> torch.Tensor:
        """Return the positions of the slots before a step, then of its new tokens, see `aligned_positions`.

        Returns:
            int64 [batch_size, capacity + query_length].
        """
        length = length[:, None]
        old = self.positions(length)
        new = length + torch.arange(query_length, device=length.device)
        hidden = length + query_length
        return aligned_positions(torch.cat([torch.where(old < 0, hidden, old), new], dim=1), hidden)


@dataclass(frozen=True)
class SinkPolicy(CircularPolicy, kind="sinks"):
    """Policy that keeps the first `sinks` tokens of each row, and a ring of the newest `window + rollback_slots`.

    A query at position q sees itself, the positions below `sinks`, and those from q - window + 1 on. Position p is
    in slot p if p < sinks, else in slot `sinks + (p - sinks) % ring`; all of it follows from the length, as in
    `RingPolicy`.

    Attributes:
        sinks: Number of first tokens, always visible.
        window: Newest tokens that a query attends to, itself included.
        rollback_slots: Extra slots, so that up to `rollback_slots + 1` tokens can be removed past the window.

    Raises:
        InputError: If `sinks` or `window` is not a positive int or `rollback_slots` a negative one.
    """

    sinks: int
    window: int
    rollback_slots: int = 0

    def __post_init__(self) -> None:
        check_count(self.sinks, "sinks of a sink policy", 1)
        check_count(self.window, "window of a sink policy", 1)
        check_count(self.rollback_slots, "rollback_slots of a sink policy", 0)

    @property
    def capacity(self) -> int:
        """See `SlotPolicy.capacity`."""
        return self.sinks + self.ring

    @property
    def ring(self) -> int:
        """See `SlotPolicy.ring`."""
        return self.window + self.rollback_slots

    @property
    def first_round(self) -> int:
        """See `SlotPolicy.first_round`."""
        # Without the extra slots, because they keep tokens that queries no longer see.
        return self.sinks + self.window

    def next_slot(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.next_slot`."""
        wrapped = self.sinks + torch.remainder(length - self.sinks + self.ring * self.sinks, self.ring)
        return torch.where(length < self.sinks, length, wrapped)

    def positions(self, length: torch.Tensor) -> torch.Tensor:
        """See `SlotPolicy.positions`."""
        slot = torch.arange(self.capacity, device=length.device)
        newest = length - 1
        # Counted from the first token after the sinks. The dividend is never negative, because ExecuTorch's integer
        # remainder has its sign.
        wrapped = newest - torch.remainder(newest - slot + self.ring * (self.sinks + 1), self.ring)
        ring = torch.where(wrapped >= self.sinks, wrapped, -1)
        return torch.where(slot < self.sinks, torch.where(slot < length, slot, -1), ring)

    def mask_positions(self, length: torch.Tensor, query_length: int, kv_read_len: int | None) -> torch.Tensor | None:
        """See `SlotPolicy.mask_positions`; each of several new tokens has its own window.

        Keys outside a token's window have a position past every query.
        """
        if not self.wraps(kv_read_len):
            return None
        length = length[:, None]
        query = length + torch.arange(query_length, device=length.device)
        if is_one(query_length):
            positions = self.positions(length + 1)
            return torch.where(self._seen(positions, query), positions, length + 1)
        hidden = length + query_length
        positions = aligned_positions(torch.cat([self.positions(length), query], dim=1), hidden)[:, None, :]
        return torch.where(self._seen(positions, query[:, :, None]), positions, hidden[:, :, None])

    def _seen(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        # The model's mask function applies causality.
        return (positions >= 0) & ((positions < self.sinks) | (positions > query - self.window))


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


@dataclass(frozen=True)
class CrossPolicy(UnchangedPolicy, kind="cross"):
    """Policy that keeps up to `capacity` encoder positions per row, from slot 0 on, and counts them separately.

    Decoder tokens do not change it: a rollback of the decoder leaves it alone, and a new encoder output overwrites the
    old one.

    Raises:
        InputError: If `capacity`, the longest encoder output, is not a positive int.
    """

    capacity: int

    follows_decoder = False
    length_name = "encoder_length"

    def __post_init__(self) -> None:
        check_count(self.capacity, "capacity of a cross policy", 1)


@dataclass(frozen=True)
class ItemsPolicy(UnchangedPolicy, kind="items"):
    """Policy that keeps `items` images of `item_slots` positions each, from slot 0 on, and a last slot that stays zero.

    A token that sees no image attends to the last slot only, whose value is zero: as if the layer were not there.
    The images that a token sees are an input of its step, so a rollback leaves this layer alone.

    Attributes:
        item_slots: Positions of one image.
        items: Number of images.

    Raises:
        InputError: If one is not a positive int.
    """

    item_slots: int
    items: int

    follows_decoder = False

    def __post_init__(self) -> None:
        check_count(self.item_slots, "item_slots of an items policy", 1)
        check_count(self.items, "items of an items policy", 1)

    @classmethod
    def within(cls, item_slots: int, slots: int | None) -> ItemsPolicy:
        """Return the policy for the images that fit in `slots`, 2 by default.

        Raises:
            InputError: If not one image fits.
        """
        if slots is None:
            return cls(item_slots, 2)
        if slots < item_slots:
            raise InputError(
                f"max_encoder_len must be at least {item_slots}, the slots of one image of this model, got {slots}; "
                f"pass {item_slots} for each image, or leave it out for two"
            )
        return cls(item_slots, slots // item_slots)

    @property
    def capacity(self) -> int:
        """See `SlotPolicy.capacity`."""
        return self.items * self.item_slots + 1

    def slots_read(self, kv_read_len: int | None) -> int:
        """See `SlotPolicy.slots_read`."""
        return self.capacity
