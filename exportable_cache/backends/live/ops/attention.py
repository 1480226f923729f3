"""Compute attention of few query tokens with this package's kernel, `few_queries.cpp`.

A decode step has one query token per sequence, so its attention is limited by how fast memory delivers keys and values.
The kernel reads only the keys that the mask shows, and divides them evenly among threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg
from torch.nn import functional

from ....cache.attention.operators import EXTENDED_ATTENTION
from ....common.compat.torch import fixed_size
from ....common.native.machine_code import MachineCode, NativeOperators

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

#: Maximum of query tokens times query heads per key head for which the kernel is used.
MOST_ROWS = 16
#: Head dimensions must be multiples of this.
_UNIT = 16
_FOLDER = Path(__file__).parent


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` with the kernel, with softcap and sinks.

    Args:
        query: [batch, heads, q_length, head_dim], float32 or bfloat16, like keys and values.
        key: [batch, kv_heads, kv_length, head_dim]. Each key head serves `heads / kv_heads` consecutive query heads.
        value: [batch, kv_heads, kv_length, value_head_dim].
        mask: [batch or 1, heads or 1, q_length or 1, kv_length], bool, or float32 or bfloat16 that is added to
            the scores.
        scale: Factor of the scores, `head_dim ** -0.5` by default.
        softcap: If given, scores become `tanh(scores / softcap) * softcap` before the mask.
        sinks: Scores of attention sinks, [batch or 1, heads or 1, q_length or 1, 1], in the queries' dtype.

    Returns:
        [batch, heads, q_length, value_head_dim].

    Raises:
        RuntimeError: If shapes do not match, or a head dimension is not a multiple of 16.
    """
    return torch.ops.exportable_cache.few_queries_attention.default(query, key, value, mask, scale, softcap, sinks)


def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


#: `EXPORTABLE_CACHE_ATTENTION=torch` disables the kernel.
OPERATORS = NativeOperators(
    MachineCode(
        *(_FOLDER / name for name in ("few_queries.cpp", "blocks.h", "seen_keys.h", "vectors.h")),
    ),
    "EXPORTABLE_CACHE_ATTENTION",
    {"few_queries_attention": _shape_of},
)


def attention_of_few_queries(module: GraphModule) -> int:
    """Replace the attention calls of a captured graph that the kernel supports, in place.

    Args:
        module: A graph captured by TorchDynamo without gradients.

    Returns:
        The number of replaced calls.
    """
    found: list[tuple[Node, Any]] = []
    for node in module.graph.nodes:
        find = _OPERANDS.get(node.target) if node.op == "call_function" else None
        operands: Any = None if find is None else find(*node.args, **node.kwargs)
        if _is_computed(map_arg(operands, lambda source: source.meta.get("example_value"))):
            found.append((node, operands))
    if not found or not OPERATORS.load():
        return 0
    for node, operands in found:
        node.target, node.args, node.kwargs = attention, operands, {}
    module.recompile()
    return len(found)


def attention_if_few(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Compute `scaled_dot_product_attention` with the kernel, which must be loaded; None if it is not supported."""
    operands = _of_torch(*args, **kwargs)
    return attention(*operands) if operands is not None and _is_computed(operands) else None


def _of_torch(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """Return the arguments of `attention` for those of torch's function, None if it has no equivalent."""
    return (query, key, value, attn_mask, scale) if dropout_p == 0.0 and not is_causal else None


def _of_ours(*operands: Any) -> tuple[Any, ...]:
    return operands


_OPERANDS: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    functional.scaled_dot_product_attention: _of_torch,
    EXTENDED_ATTENTION: _of_ours,
}


def _is_computed(operands: tuple[Any, ...] | None) -> bool:
    """Return True if the kernel supports these tensors."""
    if operands is None:
        return False
    query, key, value, mask, scale, softcap, sinks, *_ = (*operands, None, None)
    tensors = [query, key, value, *(one for one in (mask, sinks) if one is not None)]
    if not all(isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.dim() == 4 for one in tensors):
        return False
    if query.dtype not in (torch.float32, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        return False
    if mask is not None and (
        mask.dtype not in (torch.bool, torch.float32, query.dtype) or fixed_size(mask.shape[-1]) == 1
    ):
        return False
    if not all(one is None or isinstance(one, float) for one in (scale, softcap)):
        return False
    if sinks is not None and sinks.dtype != query.dtype:
        return False
    sizes = [fixed_size(size) for size in (*query.shape, key.shape[1], value.shape[3])]
    fixed = [size for size in sizes if size is not None]
    if len(fixed) < len(sizes):
        return False
    _, heads, q_length, dim, kv_heads, value_dim = fixed
    is_small = kv_heads > 0 and heads % kv_heads == 0 and 0 < heads // kv_heads * q_length <= MOST_ROWS
    return is_small and dim % _UNIT == 0 and value_dim % _UNIT == 0
