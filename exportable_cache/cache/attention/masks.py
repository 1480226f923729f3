"""Attention masks from absolute positions, registered with transformers under our name.

Transformers describes a mask as a function of (batch, head, query position, key position) and builds it from
`arange(q_length) + q_offset` against `arange(kv_length) + kv_offset`. The offsets a static cache gives are tensors, one
per row and slot where needed, so the same expression yields the position every slot of a ring really holds, and causal,
sliding and chunked mask functions are right unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ...common.compat.torch import has_known_remainder
from ..checks import check_covers, check_rows
from ..slots import ALIGNMENT, aligned, needs_alignment


def position_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return an additive mask, in the signature of transformers' `AttentionMaskInterface` (masking_utils.py, 5.23).

    Args:
        batch_size: Number of rows.
        q_length: New tokens.
        kv_length: Keys that the layer returns for them.
        q_offset: Position of the first query: int, or int64 0-D or [batch_size, 1].
        kv_offset: Offset of the keys from `arange(kv_length)`: int, or int64 0-D, [kv_length], [batch_size, kv_length],
            or [batch_size, q_length, kv_length] if queries see different keys.
        mask_function: Function that returns what may be seen, elementwise over broadcast positions.
        attention_mask: Padding mask [batch_size, tokens], False on padding, indexed by position: left and right padding
            alike. Keys past its end count as padding.
        dtype: Dtype of the result, the model's.
        allow_is_bidirectional_skip: True if None may represent a mask that hides nothing.
        device: Device of the result.
        **kwargs: Ignored.

    Returns:
        [batch_size, 1, q_length, kv_length]: 0 where seen, the lowest finite value elsewhere, so that a row of padding
        stays finite. Or None, see above.

    Raises:
        InputError: Outside of traced paths, over a static cache: if `attention_mask` ends before the new tokens, or
            the cache has another number of rows than the batch.
    """
    if isinstance(q_offset, torch.Tensor) and attention_mask is not None:
        check_covers(attention_mask, q_offset, q_length)
    if allow_is_bidirectional_skip and attention_mask is None:
        return None
    query = _positions(q_length, q_offset, device)[:, None, :, None]
    key = _positions(kv_length, kv_offset, device)
    key = key[:, None] if key.dim() == 3 else key[:, None, None, :]
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    seen = mask_function(batch, head, query, key)
    if attention_mask is not None:
        seen = seen & _unpadded(attention_mask, batch, key)
    # Chosen in float32 and cast, because `where` on bfloat16 is miscomputed by torch-tensorrt 2.13.
    lowest = torch.finfo(dtype).min
    mask = torch.where(seen, 0.0, lowest).to(dtype)
    # Expanded, because some models need a mask of every row (SpeechT5).
    if mask.shape[0] not in (1, batch_size):
        check_rows(mask.shape[0], batch_size)
    return mask if mask.shape[0] == batch_size else mask.expand(batch_size, *mask.shape[1:])


def _positions(length: int, offset: int | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return absolute positions, int64 [batch_size or 1, length], or [batch_size, q_length, length] by the offset."""
    positions = torch.arange(length, device=device) + offset
    return positions[None, :] if positions.dim() == 1 else positions


def _unpadded(attention_mask: torch.Tensor, batch: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return True for each key position that is a real token: bool [batch_size, 1, 1 or q_length, kv_length]."""
    last = attention_mask.shape[-1] - 1
    known = attention_mask.to(torch.bool)[batch, key.clamp(min=0, max=last)]
    return known & (key <= last)


def is_unaligned(mask: torch.Tensor) -> bool:
    """Return True if a traced mask has a width that is aligned at some lengths only; false for known widths."""
    if not needs_alignment(mask) or not torch.compiler.is_compiling():
        return False
    return not has_known_remainder(mask.shape[-1], ALIGNMENT)


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask of `aligned` keys, [..., width], which hides the padding.

    Args:
        mask: Additive or bool, [..., kv_length].
    """
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    padded = aligned(mask, mask.dim() - 1)
    return torch.where(torch.arange(padded.shape[-1], device=mask.device) < mask.shape[-1], padded, hidden)


def register_masks(*names: str) -> None:
    """Make `position_mask` the mask function of these attention implementations."""
    for name in names:
        AttentionMaskInterface.register(name, position_mask)
