"""Layers that attend and keep linear states at once (Falcon-H1, Zamba, Inkling): keys and values beside fixed states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .full import FullLayer
from .linear import LinearStates, StateShape
from .ring import RingLayer


class HybridFullLayer(LinearStates, FullLayer):
    """A `FullLayer` with the states of `LinearStates`.

    Args:
        batch_size, num_heads, head_dim, capacity, options: See `FullLayer`.
        conv_states, recurrent_states: See `LinearStates`.
    """

    other_state = FullLayer.state
    config_names = (*FullLayer.config_names, *LinearStates.config_names)

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        capacity: int,
        *,
        conv_states: Sequence[StateShape | None],
        recurrent_states: Sequence[StateShape | None],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self._set_shapes(conv_states, recurrent_states, dtype)
        FullLayer.__init__(self, batch_size, num_heads, head_dim, capacity, dtype=dtype, **options)


class HybridRingLayer(LinearStates, RingLayer):
    """A `RingLayer` with the states of `LinearStates`.

    Args:
        batch_size, num_heads, head_dim, window, options: See `RingLayer`.
        conv_states, recurrent_states: See `LinearStates`.
    """

    other_state = RingLayer.state
    config_names = (*RingLayer.config_names, *LinearStates.config_names)

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        window: int,
        *,
        conv_states: Sequence[StateShape | None],
        recurrent_states: Sequence[StateShape | None],
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self._set_shapes(conv_states, recurrent_states, dtype)
        RingLayer.__init__(self, batch_size, num_heads, head_dim, window, dtype=dtype, **options)
