"""Cross-attention layers: over an encoder's output, and over images between layers of self-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ..checks import check_new_states, is_traced
from .layer import CacheLayer

if TYPE_CHECKING:
    from ..policies import CrossPolicy
    from ..step import StepContext


class CrossLayer(CacheLayer):
    """Layer of the keys and values of one encoder output, under a `CrossPolicy`."""

    policy: CrossPolicy
    encoder_length: torch.Tensor

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """See `CacheLayer.begin`."""
        super().begin(context, max_len_ever)
        #: Slots of the newest output, padding included; all slots if unknown. A host value, for eager use.
        self.written = self.policy.capacity
        self._announced: torch.Tensor | None = None

    def announce_length(self, encoder_length: torch.Tensor) -> None:
        """Set the number of real positions of each row in the next encoder output: int64 [batch_size]."""
        self._announced = encoder_length

    # The types differ because transformers annotates lengths as int, although its static layers keep a tensor.
    @property
    def cumulative_length(self) -> torch.Tensor:  # type: ignore[override]
        """Encoder positions held per row, int64 [batch_size]."""
        return self.encoder_length

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing, because the removed tokens are the decoder's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one encoder output from slot 0 on.

        All of its positions count as real, unless `announce_length` was called.

        Args:
            key_states: [batch_size, num_heads, encoder_length, head_dim].
            value_states: [batch_size, num_heads, encoder_length, value_head_dim].
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            The new keys and values.

        Raises:
            InputError: If there are more than `capacity` positions, or shape, dtype or device differ from the layer's.
        """
        length = key_states.shape[2]
        if not is_traced(self.encoder_length):
            assert self.storage is not None
            check_new_states(self.storage, (self.keys, self.values), (key_states, value_states))
            if length > self.policy.capacity:
                raise InputError(
                    f"the encoder gave {length} positions, the cross-attention layer holds {self.policy.capacity}; "
                    "shorten the input, or allocate with a larger max_encoder_len"
                )
            self.written = length
        slots = torch.arange(length, device=self.device).expand(key_states.shape[0], length)
        self.write(slots, key_states, value_states)
        lengths = torch.full_like(self.encoder_length, length) if self._announced is None else self._announced
        self._announced = None
        # As a difference, because ExecuTorch merges outputs of equal value, and loses all layers except the last.
        change = lengths - self.encoder_length
        if self.context.in_place:
            self.encoder_length.add_(change)
        else:
            self.encoder_length = self.encoder_length + change
        return key_states, value_states


class ItemsLayer(CacheLayer):
    """Layer of the keys and values of images, under an `ItemsPolicy`.

    Models skip such a layer in a step if it is not initialized. It is initialized in steps that have the images that
    each token sees, see `StepContext.sees_items`.
    """

    def begin(self, context: StepContext, max_len_ever: int | None) -> None:
        """See `CacheLayer.begin`."""
        super().begin(context, max_len_ever)
        self.is_initialized = context.sees_items

    @property
    def device(self) -> torch.device:
        """See `CacheLayer.device`."""
        # Not from the length, because a step provides none to layers that do not follow the decoder.
        return self.keys.device

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing, because the removed tokens are the decoder's."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write all images, from slot 0 on.

        Args:
            key_states: [batch_size, num_heads, items * item_slots, head_dim].
            value_states: [batch_size, num_heads, items * item_slots, value_head_dim].
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            Keys and values of all slots.

        Raises:
            InputError: Outside of a session's step, because only that knows the images that a token sees.
        """
        if not self.context.sees_items:
            raise InputError(
                "a static cache takes images only in a session; use Session.from_model(model, cache, "
                "modalities=['image']), or DynamicCache"
            )
        length = key_states.shape[2]
        slots = torch.arange(length, device=self.device).expand(key_states.shape[0], length)
        return self.read(self.slots_read, self.write(slots, key_states, value_states))
