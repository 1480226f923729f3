"""The recurrent state that a scan starts from, handed from a cache layer to a scan whose signature has no place for it.

Mamba's models first give their layer the inputs of its convolution, `update_conv_state`, and then call a scan that
always starts from zeros (`models/patches` replaces it). Between the two the state waits here.

It is kept per thread, as two sessions in two threads would otherwise take each other's state. It is a `threading.local`
because TorchDynamo (2.13) traces reads and writes of its attributes, and none of a `ContextVar`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class _Carried(threading.local):
    def __init__(self) -> None:
        # On the instance, in every thread: guards of a thread's first graph would else fail once a step has set them.
        self.state: torch.Tensor | None = None
        #: Scans of this step that took their part of it.
        self.heads = 0


_carried = _Carried()


def carry(state: torch.Tensor | None) -> None:
    """Leave the state [batch, ...] for the scan of the step that this thread is in, or None where that step is over."""
    _carried.state = state
    _carried.heads = 0


def take_carried() -> torch.Tensor | None:
    """The state that the next scan of this thread's step starts from, or None outside of a step over one of our layers.

    Returns:
        [batch, channels, states]. Of a state [batch, heads, channels, states], which Zamba scans head by head, that
        of the next head. Nothing is left after the last.
    """
    state = _carried.state
    if state is None:
        return None
    if state.dim() == 3:
        carry(None)
        return state
    head = _carried.heads
    _carried.heads = head + 1
    if head + 1 == state.shape[1]:
        _carried.state = None
    return state[:, head]
