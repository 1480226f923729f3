"""Layers that keep nothing: they attend over another layer's keys and values, or do not attend at all."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InputError
from .layer import CacheLayer


class DummyLayer(CacheLayer):
    """Stands for a decoder layer without state, so that every decoder layer has its index in the cache.

    Gemma 3n and Gemma 4 hand the keys and values of an earlier layer on inside the step, so the layers that reuse them need
    no storage; layers of nothing but an MLP (Nemotron-H) need none either. Transformers' type for both is "dummy".
    """

    is_dummy = True

    def __init__(self) -> None:
        self.allocate({}, torch.float32, "cpu")

    def _finish(self, high_water: int | None) -> None:
        # Nothing was ever overwritten.
        super()._finish(high_water=0)

    @property
    def max_length(self) -> None:
        return None

    def max_rollback(self, length: int, high_water: int) -> int:
        return length

    def slot_positions(self, query_length: int) -> None:
        raise InputError("a DummyLayer has no keys; masks are sized by a layer that has some")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Refused: there is nowhere to put them.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "this layer shares another layer's keys and values, or has none, but the model wrote some; "
            "allocate the cache with ExportableCache.from_model"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to take back."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Nothing to select."""
