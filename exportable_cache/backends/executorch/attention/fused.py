"""Attention through operators of one call, ExecuTorch's own or this package's, for the layers they compute exactly.

ExecuTorch's know causal attention and a mask, and nothing else, so each layer of a model is looked at first: see
`fusable_layers`; for this package's, `own_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AttentionInterface

from ....cache.attention.functions import EXTRAS, matmul_attention
from ....cache.attention.masks import register_masks
from ....cache.layers import CacheLayer
from ....cache.policies import FullPolicy, RingPolicy
from ....cache.storage import FloatStorage, HalfStorage, Int8Storage
from ....common.compat.executorch import register_fused_operators, register_quantized_operators
from ....errors import UnsupportedModelError
from ....models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ....models.layers.layout import layer_types_and_windows
from ...probe_attention import is_causal, probe_attention
from ..native import operators  # noqa: F401  registers torch.ops.exportable_cache.attention and write
from .fused_kernels import FusedFullKernel, FusedKernel, FusedRingKernel, takes_latents, updated_just_now
from .native_layers import native_kernels
from .rows_kernel import RowsKernel, takes_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

register_fused_operators()
register_quantized_operators()

EXECUTORCH_ATTENTION = "exportable_cache_executorch"

# Storages that the kernels' attention can read.
_STORAGES = (FloatStorage, HalfStorage, Int8Storage)


def executorch_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Fused attention for the keys of a fused layer, `matmul_attention` for all others.

    Args:
        query: [1, heads, q_length, head_dim].
        key, value: What the cache layer returned.
        attention_mask: As the layer's `slot_positions` make it.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.

    Returns:
        [1, q_length, heads, head_dim], and None for the weights.
    """
    step = updated_just_now(key)
    if step is None:
        return matmul_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = {name: kwargs[name] for name in (*EXTRAS, "indices") if kwargs.get(name) is not None}
    kernel = step.kernel
    if kernel.attends_latents:
        extras["module"] = module
    return kernel.attend(step, query, attention_mask, scaling, **extras), None


def fuse_layers(model: PreTrainedModel, cache: ExportableCache, own: bool = False) -> ExportableCache:
    """The cache with its fusable layers in the operators' layout, and all others as they are.

    Args:
        own: Use operators of this package where it has them.

    Raises:
        UnsupportedModelError: If there are several rows, and a layer that neither these nor plain operators can serve.
    """
    several = cache.batch_size > 1
    if isinstance(cache, ExportableEncoderDecoderCache):
        # The probe below feeds a text decoder, and T5's family has a position bias.
        if several:
            _refuse_rows(model, cache, range(len(cache.layers)))
        return cache
    if own or several:
        kernels: Sequence[FusedKernel | None] = native_kernels(model, cache) if own else [None] * len(cache.layers)
    else:
        fusable = fusable_layers(model, cache)
        kernels = [fused_kernel(layer) if fuse else None for layer, fuse in zip(cache.layers, fusable, strict=True)]
        # Beside layers that need methods of their own (sinks; soft-capping over 8 bits) the branches of fused layers do
        # not lower.
        if not all(kernel or _is_plain(layer) for layer, kernel in zip(cache.layers, kernels, strict=True)):
            return cache
    pairs = list(zip(cache.layers, kernels, strict=True))
    if several:
        alike = [index for index, (layer, kernel) in enumerate(pairs) if kernel is None and not takes_rows(layer)]
        if alike:
            _refuse_rows(model, cache, alike)
        return ExportableCache([kernel.fused(one) if kernel else RowsKernel.over(one) for one, kernel in pairs])
    return ExportableCache([layer if kernel is None else kernel.fused(layer) for layer, kernel in pairs])


def _refuse_rows(model: PreTrainedModel, cache: ExportableCache, layers: Sequence[int]) -> NoReturn:
    raise UnsupportedModelError(
        f"batch_size is {cache.batch_size}, but layers {', '.join(map(str, layers))} of {type(model).__name__} are of "
        "a kind that plain operators of ExecuTorch write at one position for all rows; export with batch_size=1, with "
        "kernels='native' where that has an operator for them, or for target 'pt2'"
    )


def one_method_suffices(cache: ExportableCache) -> bool:
    """Whether a method of dynamic length decodes as fast as one of its own would, given what `fuse_layers` made of the
    layers.

    Rings that are not fused need a static length of one to know that they may be written in place.
    """
    return all(
        isinstance(layer.kernel, FusedKernel) or (_is_plain(layer) and isinstance(layer.policy, FullPolicy))
        for layer in cache.layers
    )


def fused_kernel(layer: CacheLayer) -> FusedKernel | None:
    """The kernel of ExecuTorch's operators for a layer's policy and storage, or None where there is none."""
    if type(layer) is not CacheLayer or not isinstance(layer.storage, _STORAGES):
        return None
    if isinstance(layer.policy, FullPolicy):
        return FusedFullKernel()
    # A ring that keeps more than its window holds tokens that the newest query does not see.
    is_exact = isinstance(layer.policy, RingPolicy) and layer.policy.rollback_slots == 0
    return FusedRingKernel() if is_exact else None


def _is_plain(layer: CacheLayer) -> bool:
    """Whether it is of tokens alone, unrounded, in slots that need no method of their own."""
    is_known = isinstance(layer.policy, (FullPolicy, RingPolicy)) and isinstance(layer.storage, FloatStorage)
    return type(layer) is CacheLayer and is_known


def fusable_layers(model: PreTrainedModel, cache: ExportableCache) -> list[bool]:
    """Which layers ExecuTorch's operators compute exactly, found by running a short prompt through the model.

    Such a layer keeps every token of one row, or exactly its window, in float32, keys and values of one size, and its
    attention goes once through the attention interface with the very tensors the cache returned, under a purely causal
    mask as long as the window is not reached, with neither soft-capping, nor sinks, nor a position bias. (The kernel
    gives not-a-number in bfloat16.)
    """

    def is_plain_and_causal(query, key, value, attention_mask, kwargs):
        if attention_mask is None or any(kwargs.get(name) is not None for name in (*EXTRAS, "indices")):
            return False
        return is_causal(attention_mask)

    calls = probe_attention(model, is_plain_and_causal)
    types = [layer_type for layer_type, _ in layer_types_and_windows(model.config)]
    return [
        fused_kernel(layer) is not None
        # Of an attention chunk a query sees what came before it in the chunk, not all that the ring holds.
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
