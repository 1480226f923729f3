"""Layer of a reference sliding window, which keeps the length of the prompt."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import StateTensor
from ..policies.ring import is_one
from .layer import CacheLayer


class PromptLayer(CacheLayer):
    """Layer of keys and values under a `PromptPolicy`, and the length of the prompt, int64 [batch_size].

    A prompt is the first step of a row, and the steps of several tokens that follow it. A step of one token ends it, so
    that graphs need no further input. A row at position 0 starts a new prompt. So sessions feed no part of a prompt as
    one token (`program.methods.chunk_sizes`), keep rows equally long (`program.lengths`), and remove no tokens
    (`PromptPolicy.max_rollback`).
    """

    is_croppable = False

    prompt_length: torch.Tensor

    def declare(self) -> dict[str, StateTensor]:
        """See `CacheLayer.declare`."""
        return {**super().declare(), "prompt_length": StateTensor("batch_size", dtype=torch.int64)}

    def length_limits(self) -> dict[str, int | None]:
        """See `CacheLayer.length_limits`."""
        return {**super().length_limits(), "prompt_length": self.policy.max_length}

    def prompt_after(self, query_length: int) -> torch.Tensor:
        """Return the length of the prompt after `query_length` more tokens, int64 [batch_size]."""
        start = self.cumulative_length
        goes_on = start == 0 if is_one(query_length) else (start == 0) | (start <= self.prompt_length)
        return torch.where(goes_on, start + query_length, self.prompt_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayer.update`."""
        self.check_update(key_states, value_states)
        # As a difference, see `CrossLayer.update`.
        change = self.prompt_after(key_states.shape[2]) - self.prompt_length
        if self.context.in_place:
            self.prompt_length.add_(change)
        else:
            self.prompt_length = self.prompt_length + change
        return super().update(key_states, value_states, *args, **kwargs)
