"""Policies of layers without keys: layers that keep nothing, and layers that keep states of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import SlotPolicy


@dataclass(frozen=True)
class NoPolicy(SlotPolicy, kind="none"):
    """Policy of a decoder layer without state, so that every decoder layer has its index in the cache.

    Gemma 3n and Gemma 4 pass the keys and values of an earlier layer on inside the step, so the layers that reuse them
    need no storage; layers that are only an MLP (Nemotron-H) need none either. Transformers' type for both is "dummy".
    """

    is_dummy = True
    keeps_keys = False
    length_name = None
    capacity = None

    @property
    def max_length(self) -> None:
        """See `SlotPolicy.max_length`."""
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        """See `SlotPolicy.max_rollback`."""
        return length


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
