"""Policies of layers without keys: layers that keep nothing, and layers that keep states of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import SlotPolicy


@dataclass(frozen=True)
class NoPolicy(SlotPolicy, kind="none"):
    """Stands for a decoder layer without state, so that every decoder layer has its index in the cache.

    Gemma 3n and Gemma 4 hand the keys and values of an earlier layer on inside the step, so the layers that reuse them
    need no storage; layers of nothing but an MLP (Nemotron-H) need none either. Transformers' type for both is "dummy".
    """

    is_dummy = True
    keeps_keys = False
    length_name = None
    capacity = None

    @property
    def max_length(self) -> None:
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        return length


@dataclass(frozen=True)
class RecurrentPolicy(SlotPolicy, kind="recurrent"):
    """No slots: every token is summed up in a state, which cannot be taken back.

    A layer that keeps keys and values beside its states has the policy of those; see `layers.linear.LinearLayer`.
    """

    is_linear = True
    keeps_keys = False
    capacity = None
    forgetting = "a layer's state sums up all that was seen"

    @property
    def max_length(self) -> None:
        return None

    def max_rollback(self, length: int, max_len_ever: int) -> int:
        # What the state was before the newest token is gone.
        return 0
