"""Forms of attention over fused layers, and the placeholder operator for the choice between them.

A step of one token folds the query heads that share a key head into rows of one product, so that every key and value is
read once, not once per query head. Its queries and output keep their order. The tokens of a prompt must be consecutive
rows, so their heads are reordered by copies of whole rows, because the runtime's permutation copies single elements.

The file chooses by a branch, `torch.cond`. If the branches were traced, every decomposition and pass of a lowering
would trace them again for each layer: half of an export's time. So a program is traced with
`exportable_cache::fused_attention`, and `lowering.insertions` replaces it by the branches at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....common.compat.torch import check

#: A form of attention: maps operands of `fused_attention` to its results.
Form = Callable[..., tuple[torch.Tensor, ...]]


@torch.library.custom_op("exportable_cache::fused_attention", mutates_args=())
def fused_attention(
    operands: Sequence[torch.Tensor], single: int, kind: str, fold: int, capacity: int, scaling: float
) -> list[torch.Tensor]:
    """Compute attention over a fused layer, in the form that `forms_of` returns for the step.

    Args:
        operands: For a full layer, the query [1, heads, query_length, head_dim], the length int64 [1], and the stored
            tensors. For a ring, the query, the mask [query_length, capacity + query_length], the slots int64
            [num_heads, query_length], the length, the stored tensors, and the new rows of each.
        single: Newest slot to read if the step has one token; negative if it has several.
        kind: `full` or `ring`.
        fold: Number of query heads that become rows of one product.
        capacity: Number of slots that are read.
        scaling: Factor on the scores.

    Returns:
        The output [1, query_length, heads, head_dim]; for a ring also its slots.
    """
    one, several = forms_of(kind, fold, capacity, scaling)
    return list((one if single >= least_single(fold) else several)(*operands))


@fused_attention.register_fake
def _(
    operands: Sequence[torch.Tensor], single: int, kind: str, fold: int, capacity: int, scaling: float
) -> list[torch.Tensor]:
    query = operands[0]
    _, heads, query_length, head_dim = query.shape
    output = query.new_empty(1, query_length, heads, head_dim)
    return [output] if kind == "full" else [output, torch.empty_like(operands[2])]


def least_single(fold: int) -> int:
    """Return the least `single` at which the folded form is correct.

    The operator reads the rows of a product as consecutive tokens that end at the last key, so the first row must not
    be negative.
    """
    return fold - 1


def forms_of(kind: str, fold: int, capacity: int, scaling: float) -> tuple[Form, Form]:
    """Return the form for one token and the form for several.

    They close over numbers only, and read positions from their operands.
    """
    if kind == "full":
        return _folded(fold, capacity, scaling), _causal(capacity, scaling)
    return _folded_over_ring(fold, capacity, scaling), _masked(capacity, scaling)


def _causal(capacity: int, scaling: float) -> Form:
    def form(query: torch.Tensor, length: torch.Tensor, *stored: torch.Tensor) -> tuple[torch.Tensor]:
        start = length[0].item()
        check(start >= 0)
        check(start < capacity)
        parts: Sequence[torch.Tensor] = stored
        if _is_rounded(stored):
            # Read from a tensor, because a sum of two symbols does not lower.
            end = (length + query.shape[2])[0].item()
            check(end >= 1)
            check(end <= capacity)
            parts = [part[:, :end] for part in stored]
        keys, values = _readable(parts)
        output = torch.ops.llama.custom_sdpa(_by_key_head(query, keys), keys, values, start, None, 0.0, True, scaling)
        return (_by_token(output),)

    return form


def _folded(fold: int, capacity: int, scaling: float) -> Form:
    def form(query: torch.Tensor, length: torch.Tensor, *stored: torch.Tensor) -> tuple[torch.Tensor]:
        newest: Any = length[0].item()
        return (_attend_folded(query, stored, newest, fold, capacity, scaling),)

    return form


def _folded_over_ring(fold: int, capacity: int, scaling: float) -> Form:
    def form(query, mask, slots, length, *rows) -> tuple[torch.Tensor, torch.Tensor]:
        newest: Any = torch.clamp(length, max=capacity - 1)[0].item()
        return _attend_folded(query, rows[: len(rows) // 2], newest, fold, capacity, scaling), slots.clone()

    return form


def _masked(capacity: int, scaling: float) -> Form:
    def form(query, mask, slots, length, *rows) -> tuple[torch.Tensor, torch.Tensor]:
        stored, new = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        joined = [torch.cat([old[:, :capacity], added], dim=1) for old, added in zip(stored, new, strict=True)]
        keys, values = _readable(joined)
        output = torch.ops.llama.custom_sdpa(_by_key_head(query, keys), keys, values, 0, mask, 0.0, False, scaling)
        return _by_token(output), slots.clone()

    return form


def _readable(stored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return keys and values in float32, as the operator takes them."""
    if len(stored) == 2:
        return [part.to(torch.float32) for part in stored]
    keys, values, key_scales, value_scales = stored
    return dequantize_slots(keys, key_scales), dequantize_slots(values, value_scales)


def _is_rounded(stored: Sequence[torch.Tensor]) -> bool:
    """Return True if slots must be converted to float32, which is then done for filled slots only."""
    return stored[0].dtype != torch.float32


def dequantize_slots(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the rows that `Int8Storage.quantize` stored, computed by one ExecuTorch kernel.

    Args:
        rows: int8 [num_heads, slots, 1, head_dim].
        scales: float32 [num_heads, slots, 1, 1].

    Returns:
        float32 [num_heads, slots, 1, head_dim].
    """
    # With zero points, because the operator without them takes two dimensions, whose symbolic product does not lower.
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    return torch.ops.quantized_decomposed.dequantize_per_token(
        rows, scales, zeros, -127, 127, torch.int8, torch.float32
    )


def _attend_folded(
    query: torch.Tensor, stored: Sequence[torch.Tensor], newest: int, fold: int, capacity: int, scaling: float
) -> torch.Tensor:
    """Attend with one token over slots 0 to `newest`, with `fold` query heads as rows of one product.

    The operator reads `start_pos + rows` keys. Without causality every row sees all of them, so query heads of a key
    head may be rows or heads.

    Args:
        query: [1, heads, query_length, head_dim]; the result is correct for a query_length of 1.
        stored: See `_readable`.
        newest: At least `least_single(fold)`.
        fold: Number of query heads per product.
        capacity: Number of slots.
        scaling: Factor on the scores.

    Returns:
        [1, query_length, heads, head_dim].
    """
    check(newest >= fold - 1)
    check(newest < capacity)
    if _is_rounded(stored):
        stored = [part[:, : newest + 1] for part in stored]
    keys, values = _readable(stored)
    _, heads, query_length, head_dim = query.shape
    num_heads = keys.shape[0]
    # Flat in between, because a view compares sizes from left to right, and a length that is equal to a number of heads
    # would become static.
    folded = query.reshape(-1).view(num_heads, fold * query_length, heads // num_heads // fold, head_dim)
    output = torch.ops.llama.custom_sdpa(folded, keys, values, newest - (fold - 1), None, 0.0, False, scaling)
    return output.view(-1).view(1, query_length, heads, head_dim)


def _by_key_head(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Reorder queries: [1, heads, query_length, head_dim] -> [num_heads, query_length, groups, head_dim]."""
    _, heads, query_length, head_dim = query.shape
    num_heads = keys.shape[0]
    groups = heads // num_heads
    grouped = query.reshape(num_heads, groups, query_length, head_dim)
    side_by_side = torch.cat([grouped.select(1, index) for index in range(groups)], dim=-1)
    return side_by_side.view(num_heads, query_length, groups, head_dim)


def _by_token(output: torch.Tensor) -> torch.Tensor:
    """Reorder outputs: [num_heads, query_length, groups, head_dim] -> [1, query_length, heads, head_dim]."""
    num_heads, query_length, groups, head_dim = output.shape
    rows = output.view(num_heads, query_length, groups * head_dim)
    side_by_side = torch.cat([rows.select(0, index) for index in range(num_heads)], dim=-1)
    return side_by_side.view(1, query_length, num_heads * groups, head_dim)
