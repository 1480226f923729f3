"""Attention of few query tokens by a kernel of this package, `few_queries.cpp`: in captured graphs, and as steps run.

A decode step has one query token a sequence, and its attention takes as long as memory takes to give keys and values.
The kernel reads those that the mask shows and no others, and all threads have as many of them to read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg
from torch.nn import functional

from ....cache.attention.extended import EXTENDED_ATTENTION
from ....common.compat.torch import fixed_size
from ....common.native.machine_code import MachineCode
from .native import RECORDING_RESULTS, OwnOperators

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

#: Query tokens of all heads that share a key head, up to which the kernel is used.
MOST_ROWS = 16
#: Sizes of heads are multiples of this.
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
    """`torch.nn.functional.scaled_dot_product_attention` by the kernel, and what it lacks.

    Args:
        query: [batch, heads, q_length, head_dim], float32 or bfloat16; so are the keys and values.
        key: [batch, kv_heads, kv_length, head_dim]: one for each `heads / kv_heads` heads that follow each other.
        value: [batch, kv_heads, kv_length, value_head_dim].
        mask: [batch or 1, heads or 1, q_length or 1, kv_length], bool, or float32 or bfloat16 to be added to scores.
        scale: Factor on the scores, `head_dim ** -0.5` by default.
        softcap: Scores become `tanh(scores / softcap) * softcap` before the mask.
        sinks: Scores that carry no value, [batch or 1, heads or 1, q_length or 1, 1], of the queries' dtype.

    Returns:
        [batch, heads, q_length, value_head_dim].

    Raises:
        RuntimeError: If shapes do not fit, or sizes of heads are no multiples of 16.
    """
    return torch.ops.exportable_cache.few_queries_attention.default(query, key, value, mask, scale, softcap, sinks)


def _shape_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


#: `EXPORTABLE_CACHE_ATTENTION` chooses who computes attention of few queries: `torch` for its own operators.
OPERATORS = OwnOperators(
    MachineCode(
        *(_FOLDER / name for name in ("few_queries.cpp", "blocks.h", "seen_keys.h", "vectors.h", "recording.h")),
        results=RECORDING_RESULTS,
    ),
    "EXPORTABLE_CACHE_ATTENTION",
    {"few_queries_attention": _shape_of},
)


def attention_of_few_queries(module: GraphModule) -> int:
    """Replace, in place, the attention of a captured graph that the kernel can compute.

    Args:
        module: As TorchDynamo gives it, without gradients.

    Returns:
        How many times.
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
    """`torch.nn.functional.scaled_dot_product_attention` by the kernel, once it is loaded; None of what it does not
    compute.
    """
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
    """Arguments of `attention`, None where it has none for one of torch's."""
    return (query, key, value, attn_mask, scale) if dropout_p == 0.0 and not is_causal else None


def _of_ours(*operands: Any) -> tuple[Any, ...]:
    return operands


_OPERANDS: dict[Any, Callable[..., tuple[Any, ...] | None]] = {
    functional.scaled_dot_product_attention: _of_torch,
    EXTENDED_ATTENTION: _of_ours,
}


def _is_computed(operands: tuple[Any, ...] | None) -> bool:
    """Whether the kernel computes attention of such tensors."""
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
