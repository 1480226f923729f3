"""The forms of attention over fused layers, and the operator that stands for the choice between them while a program is
traced.

A step of one token folds the query heads that share a key head into rows of one product, so that every key and value is
read once, not once per query head. Its queries and output are read in that order as they are. The several tokens of a
prompt, whose rows must be consecutive tokens, have their heads put in order by copies of whole rows: the runtime's own
permutation goes by single numbers.

The file chooses by a branch, which `torch.cond` would make of the two forms. Traced as such, each layer's branches are
traced again by every decomposition and pass of a lowering: half of an export's time. So a program is traced and lowered
with one operator, `exportable_cache::fused_attention`, in their place, and `branches` puts the branches in at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....common.compat.torch import check

#: One form: operands of the operator below to its results.
Form = Callable[..., tuple[torch.Tensor, ...]]


@torch.library.custom_op("exportable_cache::fused_attention", mutates_args=())
def fused_attention(
    operands: Sequence[torch.Tensor], single: int, kind: str, fold: int, capacity: int, scaling: float
) -> list[torch.Tensor]:
    """Attention over a fused layer, in the form that `forms_of` gives for the step.

    Args:
        operands: Of a full layer, the query [1, heads, query_length, head_dim], the length int64 [1], and the stored
            tensors. Of a ring, the query, the mask [query_length, capacity + query_length], the slots int64 [num_heads,
            query_length], the length, the stored tensors, and the new rows of each.
        single: The newest slot to read if the step has one token, anything below zero if it has several.
        kind: `full` or `ring`.
        fold: Query heads that become rows of one product.
        capacity: Slots that are read.
        scaling: Factor on the scores.

    Returns:
        The output [1, query_length, heads, head_dim]; of a ring also its slots.
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
    """The least `single` at which the folded form is right.

    The operator takes the rows of a product for consecutive tokens ending at the last key, so their first may not be
    negative.
    """
    return fold - 1


def forms_of(kind: str, fold: int, capacity: int, scaling: float) -> tuple[Form, Form]:
    """The form for one token and the form for several.

    What they close over is numbers, and positions are read inside.
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
            # Read, not computed from `start`: a sum of two symbols does not lower.
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
    """Keys and values as the operator takes them, in float32: as they are, made wider, or times their scales."""
    if len(stored) == 2:
        return [part.to(torch.float32) for part in stored]
    keys, values, key_scales, value_scales = stored
    return dequantize_slots(keys, key_scales), dequantize_slots(values, value_scales)


def _is_rounded(stored: Sequence[torch.Tensor]) -> bool:
    """Whether slots are made float32 before they are read: only those that are filled."""
    return stored[0].dtype != torch.float32


def dequantize_slots(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `Int8Storage.quantize` has kept, through one kernel of ExecuTorch.

    Args:
        rows: int8 [num_heads, slots, 1, head_dim].
        scales: float32 [num_heads, slots, 1, 1].

    Returns:
        float32 [num_heads, slots, 1, head_dim].
    """
    # The operator that can do without zero points takes two dimensions: their product, of a symbolic length, does not
    # lower.
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    return torch.ops.quantized_decomposed.dequantize_per_token(
        rows, scales, zeros, -127, 127, torch.int8, torch.float32
    )


def _attend_folded(
    query: torch.Tensor, stored: Sequence[torch.Tensor], newest: int, fold: int, capacity: int, scaling: float
) -> torch.Tensor:
    """Attention of one token over slots 0 to `newest`, `fold` query heads as rows of one product.

    The operator reads `start_pos + rows` keys, and without causality every row sees them all: which of the query heads
    of a key head are its rows, and which its heads, is all one.

    Args:
        query: [1, heads, query_length, head_dim]; the result is right for a query_length of 1.
        stored: See `_readable`.
        newest: At least `least_single(fold)`.

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
    folded = query.reshape(num_heads, fold * query_length, heads // num_heads // fold, head_dim)
    output = torch.ops.llama.custom_sdpa(folded, keys, values, newest - (fold - 1), None, 0.0, False, scaling)
    return output.view(1, query_length, heads, head_dim)


def _by_key_head(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries of several tokens beside their key head: [1, heads, query_length, head_dim] -> [num_heads, query_length,
    groups, head_dim].
    """
    _, heads, query_length, head_dim = query.shape
    num_heads = keys.shape[0]
    groups = heads // num_heads
    grouped = query.reshape(num_heads, groups, query_length, head_dim)
    side_by_side = torch.cat([grouped.select(1, index) for index in range(groups)], dim=-1)
    return side_by_side.view(num_heads, query_length, groups, head_dim)


def _by_token(output: torch.Tensor) -> torch.Tensor:
    """The way back to transformers' order: [num_heads, query_length, groups, head_dim] -> [1, query_length, heads,
    head_dim].
    """
    num_heads, query_length, groups, head_dim = output.shape
    rows = output.view(num_heads, query_length, groups * head_dim)
    side_by_side = torch.cat([rows.select(0, index) for index in range(num_heads)], dim=-1)
    return side_by_side.view(1, query_length, num_heads * groups, head_dim)
