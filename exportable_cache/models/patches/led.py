"""LED: its decoder masks nothing in a step of one token, whose keys a static cache has more of than were seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .conditions import over_our_cache, step_mask
from .patch import Patch

if TYPE_CHECKING:
    import torch
    from torch import nn


def _led_attention(
    self: nn.Module,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    original: Callable,
    **kwargs: Any,
) -> Any:
    if key_value_states is None and attention_mask is None:
        layers = getattr(past_key_values, "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        attention_mask = step_mask(layer, hidden_states)
    return original(
        self,
        hidden_states,
        key_value_states=key_value_states,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        **kwargs,
    )


PATCHES = {
    "led": (
        Patch(
            "led.modeling_led",
            "LEDDecoderAttention.forward",
            over_our_cache(_led_attention),
            "it masks nothing in a step of one token",
            digests=("f50557b77079226f",),
        ),
    )
}
