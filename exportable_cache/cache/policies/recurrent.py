"""Linear attention, state space and convolution layers: one state of fixed size in place of slots."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import SlotPolicy


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
