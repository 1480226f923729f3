"""Conditions under which a patch replaces a method: a static cache, or a tracer. Other calls run the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from ...cache.attention import ATTENTION_NAMES
from ...cache.attention.functions import matmul_attention
from ...cache.attention.masks import position_mask
from ...cache.layers import CacheLayer
from ...common.compat.transformers import attention_implementation, cache_name

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


#: Name of the cache in modeling code, as argument and as field of outputs. Replacements call it `cache`.
CACHE = cache_name()
# Names before transformers 5.24, which its users may still use.
_RENAMED = {"past_key_values": "cache", "cache_params": "cache", "past_key_values_length": "cache_length"}
_CACHES = ("cache", "past_key_values", "layer_past", "cache_params")


def with_new_names(replacement: Callable) -> Callable:
    """Wrap a replacement to take its arguments `cache` and `cache_length` also by their old names."""
    parameters = inspect.signature(replacement).parameters
    names = {old: new for old, new in _RENAMED.items() if new in parameters}

    def renaming(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **{names.get(name, name): value for name, value in kwargs.items()})

    return renaming if names else replacement


def over_our_cache(replacement: Callable) -> Callable[[Callable], Callable]:
    """Create a patch of a method that applies to calls with our caches, and with a `specs.ProbeCache`.

    Args:
        replacement: Function with the method's arguments, and the method itself as `original`.
    """

    def applies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        if cache is None:
            cache = next((one for one in args if isinstance(one, Cache)), None)
        return getattr(cache, "is_probe", False) or any(
            isinstance(layer, CacheLayer) for layer in getattr(cache, "layers", ())
        )

    return _where(applies, replacement)


def only_traced(replacement: Callable) -> Callable[[Callable], Callable]:
    """Create a patch of a method that applies where values cannot be read: under a tracer, and on the meta device.

    Args:
        replacement: Function with the method's arguments, and the method itself as `original`.
    """

    def applies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return torch.compiler.is_compiling() or any(
            isinstance(one, torch.Tensor) and one.device.type == "meta" for one in args
        )

    return _where(applies, replacement)


def _where(
    applies: Callable[[tuple[Any, ...], dict[str, Any]], bool], replacement: Callable
) -> Callable[[Callable], Callable]:
    """Create a patch of a method that applies where a function of the arguments and keyword arguments is True."""
    replacement = with_new_names(replacement)

    def patch(original: Callable) -> Callable:
        def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if applies(args, kwargs):
                return replacement(self, *args, original=original, **kwargs)
            return original(self, *args, **kwargs)

        return method

    return patch


def step_mask(layer: Any, hidden_states: torch.Tensor, window: int | None = None) -> torch.Tensor | None:
    """Return the additive mask [batch, 1, q_length, kv_length] of a cache layer before it is updated.

    Args:
        layer: Layer of a cache.
        hidden_states: [batch, q_length, hidden].
        window: Tokens that each token sees, including itself; None for all.

    Returns:
        The mask, or None if the layer is not a `CacheLayer`.
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
    """Return our or the target's attention function that a config names, else the portable one.

    It is for models whose code does not use transformers' attention interface.
    """
    name = attention_implementation(config) or ""
    return AttentionInterface()[name] if name.startswith(ATTENTION_NAMES[0]) else matmul_attention


def kept_hidden_states(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Return the hidden states that the head needs: the last `logits_to_keep`, all for 0, or those it indexes."""
    if isinstance(logits_to_keep, torch.Tensor):
        return hidden_states[:, logits_to_keep]
    # A slice, because a step may be shorter than `logits_to_keep`.
    return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
