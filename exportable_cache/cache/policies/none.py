"""Layers that keep nothing: they attend over another layer's keys and values, or do not attend at all."""

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
