"""When a replacement acts: over a cache of ours, or under a tracer. Everything else goes to the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from ...cache.attention import ATTENTION_NAMES
from ...cache.attention.functions import matmul_attention
from ...cache.attention.masks import position_mask
from ...cache.layers import CacheLayer
from ...common.compat.transformers import attention_implementation

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def over_our_cache(replacement: Callable) -> Callable[[Callable], Callable]:
    """A patch of a method that acts over a cache of ours, or over a `layout.ProbeCache`, which sees what a model keeps.

    Args:
        replacement: Takes the method's arguments, and the method itself as `original`.
    """

    def patch(original: Callable) -> Callable:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("past_key_values", kwargs.get("layer_past", kwargs.get("cache_params")))
            if cache is None:
                cache = next((one for one in args if isinstance(one, Cache)), None)
            if getattr(cache, "is_probe", False) or any(
                isinstance(layer, CacheLayer) for layer in getattr(cache, "layers", ())
            ):
                return replacement(self, *args, original=original, **kwargs)
            return original(self, *args, **kwargs)

        return method

    return patch


def only_traced(replacement: Callable) -> Callable[[Callable], Callable]:
    """A patch of a method that acts where values cannot be read, that is under a tracer and on the meta device.

    Args:
        replacement: Takes the method's arguments, and the method itself as `original`.
    """

    def patch(original: Callable) -> Callable:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _without_values(args):
                return replacement(self, *args, original=original, **kwargs)
            return original(self, *args, **kwargs)

        return method

    return patch


def _without_values(args: tuple[Any, ...]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.device.type == "meta" for one in args)


def step_mask(layer: Any, hidden_states: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
    """Additive mask [batch, 1, q_length, kv_length] of a layer that is about to be updated, None of a layer not ours.

    Args:
        hidden_states: [batch, q_length, hidden].
        window: Tokens that each sees, itself included; None for all.
    """
    if not isinstance(layer, CacheLayer):
        return None
    batch_size, q_length = hidden_states.shape[:2]
    kv_length, kv_offset = layer.get_mask_sizes(q_length)
    return position_mask(
        batch_size,
        q_length,
        kv_length,
        layer.cumulative_length[:, None],
        kv_offset,
        causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        dtype=hidden_states.dtype,
        device=hidden_states.device,
    )


def attention_function(config: PreTrainedConfig) -> Callable:
    """The attention function of ours or of a target that a model is switched to, the portable one under any other name.

    For models whose own code knows no attention functions.
    """
    name = attention_implementation(config) or ""
    return AttentionInterface()[name] if name.startswith(ATTENTION_NAMES[0]) else matmul_attention


def kept_hidden_states(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """What of [batch, length, hidden] the head is for: the last `logits_to_keep`, all for 0, or those it names."""
    if isinstance(logits_to_keep, torch.Tensor):
        return hidden_states[:, logits_to_keep]
    # A step may be shorter than any number but 1.
    return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
