"""`exportable_cache::kv_cache_update`: write new keys or values into a static cache, each row at its own position.

A graph keeps it as one node, so that a target may lower it to what it has: TensorRT's KVCacheUpdate layer writes in
place (https://docs.nvidia.com/deeplearning/tensorrt, IKVCacheUpdateLayer), a scatter does without aliasing.
"""

from __future__ import annotations

import torch

from ...common.compat.torch import check


@torch.library.custom_op("exportable_cache::kv_cache_update", mutates_args=())
def kv_cache_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The cache with `update` at positions `start[b] .. start[b] + Q - 1` of each row.

    The caller keeps `start[b] + Q <= S`; no lowering can check it.

    Args:
        cache: [B, H, S, D].
        update: [B, H, Q, D], of the cache's dtype.
        start: int64 [B].

    Returns:
        [B, H, S, D], a new tensor.
    """
    return scatter_update(cache, update, start)


@kv_cache_update.register_fake
def _(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    # Static facts only: lengths may be symbolic.
    check(update.dtype == cache.dtype, lambda: f"update is {update.dtype}, the cache {cache.dtype}; cast it")
    check(start.dtype == torch.int64, lambda: f"start is {start.dtype}; it must be int64")
    check(start.dim() == 1, lambda: f"start has {start.dim()} dimensions; it must be [batch]")
    return torch.empty_like(cache)


def scatter_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The same in plain operators, for runtimes that cannot alias; it copies the cache."""
    batch, heads, length, dim = update.shape
    slots = start[:, None] + torch.arange(length, device=cache.device)
    return cache.scatter(2, slots[:, None, :, None].expand(batch, heads, length, dim), update)


def reference_update(cache: torch.Tensor, update: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The oracle: row by row, by slices."""
    result = cache.clone()
    for row, first in enumerate(start.tolist()):
        result[row, :, first : first + update.shape[2]] = update[row]
    return result
