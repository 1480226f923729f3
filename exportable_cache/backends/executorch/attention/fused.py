"""Choose fused attention operators for the layers that they compute exactly, and call them.

ExecuTorch's operators compute causal and masked attention only, so `fusable_layers` probes each layer of a model first.
`native_layouts` does the same for this package's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AttentionInterface

from ....cache.attention.functions import EXTRAS, SELECTIONS, matmul_attention
from ....cache.attention.masks import register_masks
from ....cache.layers import CacheLayer
from ....cache.policies import FullPolicy, RingPolicy, SinkPolicy
from ....cache.storage import FloatStorage, HalfStorage, Int4Storage, Int8Storage
from ....common.compat.executorch import register_fused_operators, register_quantized_operators
from ....errors import UnsupportedModelError
from ....models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ....models.layers.specs import cached_layers
from ....models.quantized_rows import has_quantized_weights
from ...probe_attention import is_causal, probe_attention
from ..native import operators  # noqa: F401  registers torch.ops.exportable_cache.attention and write
from .layouts import (
    FusedFullLayout,
    FusedLayout,
    FusedRingLayout,
    NativeLatentLayout,
    NativeLayout,
    RowsLayout,
    step_of_keys,
    takes_latents,
    takes_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ....cache.layers import CacheLayer
    from ....models.cache_factory import ExportableCache


register_fused_operators()
register_quantized_operators()

EXECUTORCH_ATTENTION = "exportable_cache_executorch"

# Storages that the fused operators can read.
_FUSED_STORAGES = (FloatStorage, HalfStorage, Int8Storage)


def executorch_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the fused operator if the keys are of a fused layer, else with `matmul_attention`.

    Args:
        module: Attention module of the model.
        query: [1, heads, q_length, head_dim].
        key: Keys that the cache layer returned.
        value: Values that the cache layer returned.
        attention_mask: Mask made from the layer's `slot_positions`, or None.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        **kwargs: Further arguments of `matmul_attention`.

    Returns:
        [1, q_length, heads, head_dim], and None for the weights.
    """
    step = step_of_keys(key)
    if step is None:
        return matmul_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = {name: kwargs[name] for name in (*EXTRAS, *SELECTIONS) if kwargs.get(name) is not None}
    layout = step.layout
    if layout.attends_latents or "block_indices" in extras:
        extras["module"] = module
    return layout.attend(step, query, attention_mask, scaling, **extras), None


def fuse_layers(model: PreTrainedModel, cache: ExportableCache, native: bool = False) -> ExportableCache:
    """Return the cache with its fusable layers in the operators' layout; other layers are unchanged.

    Args:
        model: Model that the cache belongs to.
        cache: Cache to convert.
        native: Use native operators for the layers that they support.

    Raises:
        UnsupportedModelError: If there are several rows, and a layer that neither fused nor plain operators can serve.
    """
    several = cache.batch_size > 1
    if isinstance(cache, ExportableEncoderDecoderCache):
        # The probe below feeds a text decoder, and T5's family has a position bias.
        if several:
            _refuse_rows(model, cache, range(len(cache.layers)))
        return cache
    if native or several:
        layouts: Sequence[FusedLayout | None] = native_layouts(model, cache) if native else [None] * len(cache.layers)
    else:
        fusable = fusable_layers(model, cache)
        layouts = [fused_layout(layer) if fuse else None for layer, fuse in zip(cache.layers, fusable, strict=True)]
        # Branches of fused layers do not lower next to layers that need separate methods (sinks, soft-capping).
        if not all(layout or _is_plain(layer) for layer, layout in zip(cache.layers, layouts, strict=True)):
            return cache
    pairs = list(zip(cache.layers, layouts, strict=True))
    if several:
        unsupported = [index for index, (layer, layout) in enumerate(pairs) if layout is None and not takes_rows(layer)]
        if unsupported:
            _refuse_rows(model, cache, unsupported)
        return ExportableCache([layout.fused(one) if layout else RowsLayout.over(one) for one, layout in pairs])
    return ExportableCache([layer if layout is None else layout.fused(layer) for layer, layout in pairs])


def _refuse_rows(model: PreTrainedModel, cache: ExportableCache, layers: Sequence[int]) -> NoReturn:
    raise UnsupportedModelError(
        f"batch_size must be 1 for layers {', '.join(map(str, layers))} of {type(model).__name__}, got "
        f"{cache.batch_size}, because ExecuTorch's plain operators write all rows of such layers at one position; "
        "export with batch_size=1, with kernels='native' if that supports them, or for target 'pt2'"
    )


def one_method_suffices(cache: ExportableCache) -> bool:
    """Return True if a method of dynamic length decodes as fast as a separate decode method.

    Rings that are not fused need a static length of one, which tells that they may be written in place.
    """
    return all(
        isinstance(layer.layout, FusedLayout) or (_is_plain(layer) and isinstance(layer.policy, FullPolicy))
        for layer in cache.layers
    )


def fused_layout(layer: CacheLayer) -> FusedLayout | None:
    """Return the layout of ExecuTorch's operators for a layer, or None if there is none."""
    if type(layer) is not CacheLayer or not isinstance(layer.storage, _FUSED_STORAGES):
        return None
    if isinstance(layer.policy, FullPolicy):
        return FusedFullLayout()
    # Rollback slots hold tokens outside the window, which the newest query must not see.
    is_exact = isinstance(layer.policy, RingPolicy) and layer.policy.rollback_slots == 0
    return FusedRingLayout() if is_exact else None


def _is_plain(layer: CacheLayer) -> bool:
    """Return True if the layer keeps unquantized keys and values in slots that need no separate methods."""
    is_known = isinstance(layer.policy, (FullPolicy, RingPolicy)) and isinstance(layer.storage, FloatStorage)
    return type(layer) is CacheLayer and is_known


def fusable_layers(model: PreTrainedModel, cache: ExportableCache) -> list[bool]:
    """Return for each layer whether ExecuTorch's operators compute it exactly, by running a short prompt.

    Such a layer keeps every token of one row, or exactly its window, in float32, with keys and values of one size. Its
    attention goes through the attention interface once, with the tensors that the cache returned, under a causal mask
    (until the window is reached), without soft-capping, sinks or position bias. The kernel returns NaN in bfloat16.
    """

    def is_plain_and_causal(query, key, value, attention_mask, kwargs):
        if attention_mask is None or any(kwargs.get(name) is not None for name in (*EXTRAS, *SELECTIONS)):
            return False
        return is_causal(attention_mask)

    calls = probe_attention(model, is_plain_and_causal)
    types = [layer_type for layer_type, _ in cached_layers(model)]
    return [
        fused_layout(layer) is not None
        # A query sees earlier tokens of its chunk, not everything in the ring.
        and types[index] != "chunked_attention"
        and layer.keys is not None
        and layer.values is not None
        and layer.storage is not None
        and layer.keys.shape == layer.values.shape
        and layer.keys.shape[0] == 1
        and layer.storage.rows_dtype == torch.float32
        and calls.get(index) == [True]
        for index, layer in enumerate(cache.layers)
    ]


executorch_attention.takes_latents = takes_latents  # type: ignore[attr-defined]
AttentionInterface.register(EXECUTORCH_ATTENTION, executorch_attention)
register_masks(EXECUTORCH_ATTENTION)


_POLICIES = (FullPolicy, RingPolicy, SinkPolicy)
_NATIVE_STORAGES = (FloatStorage, HalfStorage, Int8Storage, Int4Storage)


def native_layouts(model: PreTrainedModel, cache: ExportableCache) -> list[NativeLayout | None]:
    """Return the native layout of each layer that native operators compute exactly, else None.

    It runs a short prompt. Such a layer keeps keys and values in float32 or fewer bits, and its attention goes through
    the attention interface with the tensors that the cache returned. A mask that is not causal, and a bias by key
    position, need a layer that keeps every token.
    """

    def needs(query, key, value, attention_mask, kwargs):
        if attention_mask is None:
            return None
        masked = not is_causal(attention_mask) or any(kwargs.get(name) is not None for name in SELECTIONS)
        return _Needs(masked, masked or kwargs.get("position_bias") is not None, hasattr(kwargs["module"], "expand_kv"))

    calls = probe_attention(model, needs, latents=not has_quantized_weights(model))
    types = [layer_type for layer_type, _ in cached_layers(model)]
    return [_layout_for(layer, types[index], calls.get(index, [])) for index, layer in enumerate(cache.layers)]


@dataclass(frozen=True)
class _Needs:
    """Requirements of one call of attention.

    Attributes:
        masked: The mask must be read.
        biased: A mask or bias is added to the scores.
        of_latents: The keys are latents.
    """

    masked: bool
    biased: bool
    of_latents: bool


def _layout_for(layer: CacheLayer, layer_type: str, calls: list[Any]) -> NativeLayout | None:
    if not isinstance(layer.policy, _POLICIES) or not isinstance(layer.storage, _NATIVE_STORAGES):
        return None
    if not calls or not all(calls) or layer.storage.rows_dtype != torch.float32:
        return None
    if dict(layer.named_state())["values"].shape[-1] == 0:
        return None
    is_full = isinstance(layer.policy, FullPolicy)
    if not is_full and any(call.biased for call in calls):
        return None
    chunked = layer_type == "chunked_attention" and not is_full
    form = (chunked, any(call.masked for call in calls), len(calls))
    if any(call.of_latents for call in calls):
        # Quantized keys and values have separate scales, but latents and rotated keys are summed in one product.
        return NativeLatentLayout(*form) if isinstance(layer.storage, (FloatStorage, HalfStorage)) else None
    return NativeLayout(*form)
