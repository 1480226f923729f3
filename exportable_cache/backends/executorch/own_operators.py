"""Operators of this package, for which only its compiled kernels have code on ExecuTorch's runtime; see `kernels/`.

`exportable_cache::causal_attention` reads keys and values as they are stored: in float32, float16 and bfloat16, in 8
and in 4 bits. It takes queries and gives its output in transformers' orders, for any number of tokens: what
`attention_forms` does with ExecuTorch's operator in two forms, a branch between them, and copies around the one for
several tokens, is one call here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...cache.storage.int4 import Int4Storage
from ...common.compat.executorch import runtime
from ...common.own_kernels import load_own_kernels
from ...errors import MissingDependencyError

_SCHEMA = "(Tensor query, Tensor[] stored, SymInt start, float scaling"
_library = torch.library.Library("exportable_cache", "FRAGMENT")
_library.define(f"causal_attention{_SCHEMA}) -> Tensor")
# ExecuTorch calls this one.
_library.define(f"causal_attention.out{_SCHEMA}, *, Tensor(a!) out) -> Tensor(a!)")


def check_own_kernels() -> None:
    """Refuse to export a program that could not be verified here.

    Raises:
        MissingDependencyError: If the compiled kernels are not loaded.
    """
    runtime()
    if load_own_kernels() is None:
        raise MissingDependencyError(
            "kernels is 'own', but the compiled kernels of this package are not in use here; build them with "
            "`exportable-cache kernels build`, or pass kernels='executorch'"
        )


def causal_attention(query: torch.Tensor, stored: Sequence[torch.Tensor], start: int, scaling: float) -> torch.Tensor:
    """Causal attention of one row over the filled slots of a full layer, in plain operators: what the kernel computes.

    Args:
        query: [1, heads, query_length, head_dim].
        stored: What the layer's storage keeps. Keys and values [num_heads, capacity, 1, dim]; of int8, and of uint8 for
            two numbers a byte as `Int4Storage` packs them, also the scales of both, float32 [num_heads, capacity, 1,
            1].
        start: Position of the first query, whose key is stored already: it sees slots 0 to `start`.
        scaling: Factor on the scores.

    Returns:
        [1, query_length, heads, value_head_dim].
    """
    heads, query_length = query.shape[1:3]
    end, groups = start + query_length, heads // stored[0].shape[0]
    rows, scales = stored[:2], stored[2:] or (None, None)
    pairs = zip(rows, scales, strict=True)
    key, value = (_numbers(part[:, :end], scale).repeat_interleave(groups, dim=0) for part, scale in pairs)
    scores = query[0].float() @ key.transpose(1, 2) * scaling
    seen = torch.arange(end) <= start + torch.arange(query_length)[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return (weights @ value).transpose(0, 1)[None].to(query.dtype).contiguous()


def _numbers(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float32 [num_heads, length, dim] of what is stored."""
    rows = Int4Storage(dtype="float32").unpack(rows) if rows.dtype == torch.uint8 else rows.float()
    return (rows if scales is None else rows * scales[:, : rows.shape[1]]).squeeze(2)


def _into(*arguments: object, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(causal_attention(*arguments))


def _empty(query: torch.Tensor, stored: Sequence[torch.Tensor], start: int, scaling: float) -> torch.Tensor:
    values = stored[1]
    packed = 2 if values.dtype == torch.uint8 else 1
    return query.new_empty(1, query.shape[2], query.shape[1], values.shape[3] * packed)


_library.impl("causal_attention", causal_attention, "CompositeExplicitAutograd")
_library.impl("causal_attention.out", _into, "CompositeExplicitAutograd")
torch.library.register_fake("exportable_cache::causal_attention", _empty, lib=_library)
