"""The layer of cross-attention to pictures between layers of self-attention (Llama 3.2 Vision)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from .layer import CacheLayer

if TYPE_CHECKING:
    from ..step import StepContext


class ItemsLayer(CacheLayer):
    """Keys and values of pictures, under an `ItemsPolicy`.

    Models leave such a layer out of a step where it is not initialised. It is in steps that say which pictures each
    token sees, see `StepContext.sees_items`.
    """

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        super().begin(context, max_len_ever)
        self.is_initialized = context.sees_items

    @property
    def device(self) -> torch.device:
        # A step hands it no length: it does not follow the decoder.
        return self.keys.device  # type: ignore[union-attr]

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do: the tokens taken back are the decoder's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write all pictures anew, from slot 0 on.

        Args:
            key_states: [batch_size, num_heads, items * item_slots, head_dim].
            value_states: [batch_size, num_heads, items * item_slots, value_head_dim].

        Returns:
            Keys and values of all slots.

        Raises:
            InputError: Outside of a session's step, which alone knows which pictures a token sees.
        """
        if not self.context.sees_items:
            raise InputError(
                "a cache of fixed size takes pictures in a session; use Session.from_model(model, cache, "
                "modalities=['image']), or DynamicCache"
            )
        length = key_states.shape[2]
        slots = torch.arange(length, device=self.device).expand(key_states.shape[0], length)
        return self.read(self.slots_read, self.write(slots, key_states, value_states))
