"""Triton kernels of `filled_attention`: attention of few queries, split over the length (flash decoding).

The length is read from a tensor, and the grid depends on sizes and the device only. So one CUDA graph serves every
length, and the cost follows the filled slots. A step with few rows and heads would use few multiprocessors, so each
pair of row and key head is divided into parts of the length, which a second kernel merges.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .latents import has_latents

#: Rows of queries of one program: tensor cores multiply at least 16.
LEAST_ROWS, MOST_ROWS = 16, 64
#: Bytes of one tile of keys or of values. Two of each must fit the shared memory of SM 8.6, which is 99 KB. Latents are
#: both, so their tiles have twice as many.
TILE_BYTES = 16384
#: Most parts of the length, which the second kernel merges at once.
MOST_PARTS = 64
#: Multiprocessors assumed where there is no GPU, in Triton's interpreter.
_MULTIPROCESSORS = 16


@triton.jit
def _attend_part(
    QUERY, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, ENDS, MASK, SINKS, SUMS, BEST, TOTAL, OUT,
    scale, softcap, slots,
    query_batch, query_head, query_row, key_batch, key_head, key_slot, value_batch, value_head, value_slot,
    key_scale_batch, key_scale_head, key_scale_slot, value_scale_batch, value_scale_head, value_scale_slot,
    mask_batch, mask_head, mask_row, mask_slot, sink_batch, sink_head, sink_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr,
    DIM: tl.constexpr, DIM_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_ENDS: tl.constexpr,
    HAS_MASK: tl.constexpr, MASK_IS_BOOL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    pair, part, first_row = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    batch, head = (pair // KV_HEADS).to(tl.int64), (pair % KV_HEADS).to(tl.int64)
    end = slots
    if HAS_ENDS:
        end = tl.minimum(tl.load(ENDS + batch), slots).to(tl.int32)
    # In whole blocks, so that parts do not share one.
    size = tl.cdiv(tl.cdiv(end, PARTS), BLOCK) * BLOCK
    first = part * size
    last = tl.minimum(first + size, end)
    row = first_row + tl.arange(0, ROWS)
    is_row = row < GROUP * QUERIES
    query_heads, token = head * GROUP + row // QUERIES, row % QUERIES
    dim, value_dim, slot = tl.arange(0, DIM_TILE), tl.arange(0, VALUE_TILE), tl.arange(0, BLOCK)
    query_at = QUERY + batch * query_batch + query_heads * query_head + token * query_row
    query = tl.load(query_at[:, None] + dim[None, :], mask=is_row[:, None] & (dim[None, :] < DIM), other=0.0)
    if ROTATED:
        # Of latent attention: keys are latents and rotated parts, and the values are the latents.
        rotated_dim = tl.arange(0, ROTATED_TILE)
        rotated_query = tl.load(
            query_at[:, None] + DIM + rotated_dim[None, :],
            mask=is_row[:, None] & (rotated_dim[None, :] < ROTATED), other=0.0,
        )  # fmt: skip
    keys_at = KEYS + batch * key_batch + head * key_head
    values_at = VALUES + batch * value_batch + head * value_head
    mask_at = MASK
    if HAS_MASK:
        mask_at = MASK + batch * mask_batch + query_heads * mask_head + token * mask_row
    sums = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    best, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS and part == 0:
        # A sink is a score without a value.
        sinks_at = SINKS + batch * sink_batch + query_heads * sink_head + token * sink_row
        best = tl.load(sinks_at, mask=is_row, other=0.0).to(tl.float32)
        total += 1.0
    for at in range(first, last, BLOCK):
        here = at + slot
        is_read = here < last
        if ROTATED:
            values = tl.load(
                keys_at + here[:, None] * key_slot + dim[None, :],
                mask=is_read[:, None] & (dim[None, :] < DIM), other=0,
            ).to(query.dtype)  # fmt: skip
            keys = tl.trans(values)
        else:
            keys = tl.load(
                keys_at + here[None, :] * key_slot + dim[:, None],
                mask=is_read[None, :] & (dim[:, None] < DIM), other=0,
            ).to(query.dtype)  # fmt: skip
        scores = tl.dot(query, keys, input_precision="ieee")
        if HAS_SCALES:
            scales_at = KEY_SCALES + batch * key_scale_batch + head * key_scale_head
            value_scales = tl.load(scales_at + here * key_scale_slot, mask=is_read, other=0.0)
            scores *= value_scales[None, :]
        if ROTATED:
            rotated = tl.load(
                values_at + here[None, :] * value_slot + rotated_dim[:, None],
                mask=is_read[None, :] & (rotated_dim[:, None] < ROTATED), other=0,
            ).to(query.dtype)  # fmt: skip
            if HAS_SCALES:
                scales_at = VALUE_SCALES + batch * value_scale_batch + head * value_scale_head
                rotated_scales = tl.load(scales_at + here * value_scale_slot, mask=is_read, other=0.0)
                scores += tl.dot(rotated_query, rotated, input_precision="ieee") * rotated_scales[None, :]
            else:
                scores = tl.dot(rotated_query, rotated, acc=scores, input_precision="ieee")
        scores *= scale
        if HAS_SOFTCAP:
            # tanh by an exponential that cannot overflow.
            small = tl.exp(-2.0 * tl.abs(scores) / softcap)
            scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - small) / (1.0 + small))
        is_seen = is_read[None, :] & is_row[:, None]
        if HAS_MASK:
            masked = tl.load(mask_at[:, None] + here[None, :] * mask_slot, mask=is_seen, other=0)
            if MASK_IS_BOOL:
                is_seen = is_seen & (masked != 0)
            else:
                scores += masked.to(tl.float32)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet would subtract infinities.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(best - base)
        total = total * kept + tl.sum(weights, 1)
        if not ROTATED:
            values = tl.load(
                values_at + here[:, None] * value_slot + value_dim[None, :],
                mask=is_read[:, None] & (value_dim[None, :] < VALUE_DIM), other=0,
            ).to(query.dtype)  # fmt: skip
            if HAS_SCALES:
                scales_at = VALUE_SCALES + batch * value_scale_batch + head * value_scale_head
                value_scales = tl.load(scales_at + here * value_scale_slot, mask=is_read, other=0.0)
        if HAS_SCALES:
            weights *= value_scales[None, :]
        sums = sums * kept[:, None]
        sums += tl.dot(weights.to(query.dtype), values, input_precision="ieee")
        best = new_best
    all_rows = GROUP * QUERIES
    if PARTS == 1:
        out_at = OUT + ((batch * QUERIES + token) * (KV_HEADS * GROUP) + query_heads) * VALUE_DIM
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_at[:, None] + value_dim[None, :], result.to(OUT.dtype.element_ty),
            mask=is_row[:, None] & (value_dim[None, :] < VALUE_DIM),
        )  # fmt: skip
    else:
        at = (pair.to(tl.int64) * PARTS + part) * all_rows + row
        tl.store(BEST + at, best, mask=is_row)
        tl.store(TOTAL + at, total, mask=is_row)
        # An empty part has no sums to read, because its total is 0.
        has_sums = is_row & (first < last)
        tl.store(
            SUMS + at[:, None] * VALUE_DIM + value_dim[None, :], sums,
            mask=has_sums[:, None] & (value_dim[None, :] < VALUE_DIM),
        )  # fmt: skip


@triton.jit
def _merge_parts(
    SUMS, BEST, TOTAL, ENDS, OUT, slots,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr,
    PARTS_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):  # fmt: skip
    pair, row = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    part, value_dim = tl.arange(0, PARTS_TILE), tl.arange(0, VALUE_TILE)
    at = (pair.to(tl.int64) * PARTS + part) * (GROUP * QUERIES) + row
    is_part = part < PARTS
    best = tl.load(BEST + at, mask=is_part, other=float("-inf"))
    total = tl.load(TOTAL + at, mask=is_part, other=0.0)
    highest = tl.max(best, 0)
    weight = tl.exp(best - tl.where(highest == float("-inf"), 0.0, highest))
    end = slots
    if HAS_ENDS:
        end = tl.minimum(tl.load(ENDS + batch), slots).to(tl.int32)
    size = tl.cdiv(tl.cdiv(end, PARTS), BLOCK) * BLOCK
    has_sums = is_part & (part * size < end)
    sums = tl.load(
        SUMS + at[:, None] * VALUE_DIM + value_dim[None, :],
        mask=has_sums[:, None] & (value_dim[None, :] < VALUE_DIM), other=0.0,
    )  # fmt: skip
    divisor = tl.sum(total * weight, 0)
    result = tl.sum(sums * weight[:, None], 0) / tl.where(divisor == 0.0, 1.0, divisor)
    query_head, token = head * GROUP + row // QUERIES, row % QUERIES
    out_at = OUT + ((batch * QUERIES + token) * (KV_HEADS * GROUP) + query_head) * VALUE_DIM
    tl.store(out_at + value_dim, result.to(OUT.dtype.element_ty), mask=value_dim < VALUE_DIM)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_sizes(rows: int, dim: int, value_dim: int, itemsize: int, rotated: int = 0) -> tuple[int, int, int, int, int]:
    """Return the sizes of a program's tiles: rows, slots, and the padded dimensions of keys, values and rotated parts.

    Args:
        rows: Query heads per key head times query tokens.
        dim: Size of a key head, or of a latent.
        value_dim: Size of a value head, or of a latent.
        itemsize: Bytes of an element of the queries, which keys and values are converted to.
        rotated: Size of the rotated part of latent attention; 0 if keys and values are separate.
    """
    dim_tile, value_tile, rotated_tile = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim, rotated))
    # The sums stay in registers, so wide heads get fewer rows.
    most = max(LEAST_ROWS, min(MOST_ROWS, 8192 // value_tile))
    tile_bytes = 2 * TILE_BYTES if rotated else TILE_BYTES
    block = max(16, min(128, tile_bytes // (max(dim_tile, value_tile) * itemsize)))
    return max(LEAST_ROWS, min(most, triton.next_power_of_2(rows))), block, dim_tile, value_tile, rotated_tile


def warps_of_merge(value_tile: int) -> int:
    """Return the number of warps that merge the parts of one query, because wide values need more registers."""
    return 4 if value_tile <= 256 else 8


def parts_of_length(programs: int, slots: int, block: int, count: int) -> int:
    """Return the number of parts that the length is divided into, a power of two.

    Args:
        programs: Programs of one part.
        slots: Slots of the cache.
        block: Slots that a program reads at once.
        count: Multiprocessors.
    """
    # Two programs for each multiprocessor, because one waits for memory while the other computes.
    wanted = min(2 * count // programs, -(-slots // block), MOST_PARTS)
    return 1 << max(0, wanted.bit_length() - 1)


def filled_attention(
    query: torch.Tensor,
    stored: Sequence[torch.Tensor],
    ends: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `FILLED_ATTENTION` on a GPU, or in Triton's interpreter."""
    # The kernel reads rows whose elements are adjacent.
    query, *stored = (
        one if one.stride(-1) == 1 or one.shape[-1] == 1 else one.contiguous() for one in (query, *stored)
    )
    batch, heads, queries, dim = query.shape
    keys, values, *scales = stored
    kv_heads, slots, key_dim = keys.shape[1:]
    rotated = values.shape[3] if has_latents(query, stored) else 0
    value_dim = key_dim if rotated else values.shape[3]
    group = heads // kv_heads
    rows, block, dim_tile, value_tile, rotated_tile = tile_sizes(
        group * queries, key_dim, value_dim, query.element_size(), rotated
    )
    blocks_of_rows = triton.cdiv(group * queries, rows)
    parts = parts_of_length(batch * kv_heads * blocks_of_rows, slots, block, multiprocessors(query.device))
    out = query.new_empty(batch, queries, heads, value_dim)
    partial = (batch * kv_heads, parts, group * queries) if parts > 1 else (0,)
    sums = query.new_empty(*partial, value_dim, dtype=torch.float32)
    best, total = (query.new_empty(partial, dtype=torch.float32) for _ in range(2))
    is_bool = mask is not None and mask.dtype == torch.bool
    if mask is not None:
        mask = mask.view(torch.uint8) if is_bool else mask
        mask = mask.expand(batch, heads, queries, slots)
    if sinks is not None:
        sinks = sinks.expand(batch, heads, queries, 1)
    # A missing tensor is represented by a pointer that is never read.
    key_scales, value_scales = scales or (best, best)
    strides: list[int] = []
    for one in (query, keys, values, key_scales, value_scales):
        strides += one.stride()[:3] if one.dim() == 4 else (0, 0, 0)
    strides += (0, 0, 0, 0) if mask is None else mask.stride()
    strides += (0, 0, 0) if sinks is None else sinks.stride()[:3]
    common: dict[str, Any] = {
        "KV_HEADS": kv_heads, "GROUP": group, "QUERIES": queries, "PARTS": parts, "VALUE_DIM": value_dim,
        "VALUE_TILE": value_tile, "BLOCK": block, "HAS_ENDS": ends is not None,
    }  # fmt: skip
    with torch.cuda.device(query.device if query.is_cuda else -1):
        _attend_part[(batch * kv_heads, parts, blocks_of_rows)](
            query, keys, values, key_scales, value_scales,
            best if ends is None else ends, best if mask is None else mask, best if sinks is None else sinks,
            sums, best, total, out,
            dim**-0.5 if scale is None else scale, 0.0 if softcap is None else softcap, slots, *strides,
            DIM=key_dim, DIM_TILE=dim_tile, ROTATED=rotated, ROTATED_TILE=rotated_tile, ROWS=rows,
            HAS_SCALES=bool(scales), HAS_MASK=mask is not None, MASK_IS_BOOL=is_bool, HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None, num_warps=4, num_stages=2, **common,
        )  # fmt: skip
        if parts > 1:
            _merge_parts[(batch * kv_heads, group * queries)](
                sums, best, total, best if ends is None else ends, out, slots,
                PARTS_TILE=max(2, parts), num_warps=warps_of_merge(value_tile), **common,
            )  # fmt: skip
    return out
