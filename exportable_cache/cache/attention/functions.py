"""Attention over a static cache, registered with transformers: grouped query heads, soft-capping, sinks, any mask.

Key and value heads are never repeated: the query heads that share one are folded into its rows instead.

`exportable_cache` goes through torch's fused attention where the model needs nothing it lacks;
`exportable_cache_matmul` always spells out the two products, for runtimes that have no attention kernel of their own.
Its products are 3-D `bmm` on views with the keys as left operand: on ExecuTorch a 4-D matmul copies the whole cache,
and keys on the left are neither transposed nor packed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from ...errors import UnsupportedModelError
from ..slots import aligned
from . import ATTENTION, ATTENTION_NAMES, MATMUL_ATTENTION
from .latents import expanded_latents, expanded_output, latent_queries
from .masks import aligned_mask, is_unaligned, register_masks
from .operators import EXTENDED_ATTENTION, EXTENSIONS, FILLED_ATTENTION, filled_keys, folded_once, is_captured, library

#: What modeling code calls attention functions by.
_CALLED = re.compile(r"(?:attention|attn)_?(?:interface|forward|fn|func|function)|ALL_ATTENTION_FUNCTIONS")

#: Arguments that models pass for attention that is not the plain kind; `matmul_attention` knows them all.
EXTRAS = ("softcap", "s_aux", "sinks", "position_bias")

#: Arguments with what an indexer selected, see `selected_mask`.
SELECTIONS = ("indices", "block_indices")

#: Arguments that models pass on, and that change nothing here, each with the reason. Any other is refused. The first
#: four are those that transformers' generative models gave with a value, of 269 tiny ones that took a prompt and a
#: token (5.23).
HARMLESS = {
    "sliding_window": "the mask has the window already, as it has for transformers' own `eager` and `sdpa`",
    "position_ids": "queries and keys are rotated before they come here",
    "use_cache": "keys and values come from the cache already",
    "logits_to_keep": "of the head",
    "output_attentions": "weights are not given out, and None is returned instead",
    "output_hidden_states": "collected around the layers",
    "output_router_logits": "of the experts",
    "vision_feature_layer": "of the projector, which takes it from the layers' outputs",
    "vision_feature_select_strategy": "of the projector, after the layers",
    "grid_thw": "of convolutions between the layers of an image encoder",
    "cache_position": "positions come as position_ids, and slots from the cache",
    "num_items_in_batch": "of the loss, as Trainer passes it",
    "token_type_ids": "of the embeddings",
    "tokenizer": "of generate's stop strings",
}


def fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in transformers' signature (`AttentionInterface`), by `scaled_dot_product_attention`.

    Args:
        module: Attention module of the model.
        query: [batch, heads, q_length, head_dim].
        key: [batch, kv_heads, kv_length, head_dim].
        value: [batch, kv_heads, kv_length, value_head_dim].
        attention_mask: Additive or bool, broadcastable to [batch, heads, q_length, kv_length], or None.
        scaling: Factor on the scores, `head_dim ** -0.5` by default.
        dropout: Dropout probability of the weights.
        is_causal: True if None as mask means causal; the module's own `is_causal` by default.
        **kwargs: What an indexer selected, see `selected_mask`; further arguments of `matmul_attention`, which then
            computes the result.

    Returns:
        [batch, q_length, heads, value_head_dim], and None for the weights.

    Raises:
        UnsupportedModelError: If neither function knows an argument, see `HARMLESS`.
    """
    refuse_unknown(module, kwargs)
    attention_mask = selected_mask(module, attention_mask, kwargs, key.shape[2], query.dtype)
    extras = {name for name in EXTRAS if kwargs.get(name) is not None}
    sinks = kwargs.get("sinks")
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].reshape(1, -1, 1, 1)
    filled = filled_keys(key, value)
    # Keys of such a module are expanded, unless its patch passed the latents of a layer through.
    of_latents = filled is not None and hasattr(module, "expand_kv")
    is_plain = extras <= EXTENSIONS and not dropout
    if filled is not None and is_plain and filled.are_supported(query, attention_mask, of_latents):
        queries = query
        if of_latents:
            queries = latent_queries(module, query)
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        softcap = kwargs.get("softcap")
        output = FILLED_ATTENTION(queries, filled.stored, filled.ends, attention_mask, scaling, softcap, sinks)
        return expanded_output(module, output) if of_latents else output, None
    if of_latents:
        key, value = expanded_latents(module, key, value)
    if extras and extras <= EXTENSIONS and attention_mask is not None and not dropout and is_captured():
        output = EXTENDED_ATTENTION(query, key, value, attention_mask, scaling, kwargs.get("softcap"), sinks)
        return output.transpose(1, 2).contiguous(), None
    if extras:
        return matmul_attention(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    batch, heads, q_length, _ = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    mask = attention_mask
    if attention_mask is not None:
        mask = folded_once(
            attention_mask, kv_heads, groups, lambda: _fold_mask(attention_mask, kv_heads, groups, q_length)
        )
        if is_unaligned(attention_mask):
            key, value = aligned(key, 2), aligned(value, 2)
    if mask is None or groups == 1:
        causal = mask is None and _causal_without_mask(module, q_length, is_causal)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal,
            enable_gqa=groups > 1,
        )
        return output.transpose(1, 2).contiguous(), None
    folded = reshaped(query, batch, kv_heads, groups * q_length, query.shape[-1])
    output = F.scaled_dot_product_attention(
        folded,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
    )
    output = reshaped(output, batch, heads, q_length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def matmul_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what `fused_attention` computes in plain products, with everything it lacks.

    Args:
        module: See `fused_attention`, as for `query` to `is_causal`.
        query: [batch, heads, q_length, head_dim].
        key: [batch, kv_heads, kv_length, head_dim].
        value: [batch, kv_heads, kv_length, value_head_dim].
        attention_mask: Additive or bool mask, or None.
        scaling: Factor on the scores.
        dropout: Dropout probability of the weights.
        is_causal: True if None as mask means causal.
        softcap: Scores become `tanh(scores / softcap) * softcap` before the mask (Gemma 2).
        s_aux: Sink logits [heads]: one more column under the softmax that carries no value (GPT-OSS).
        sinks: Sink logits of each query, [batch, heads, q_length, 1] (Inkling 2).
        position_bias: Added to the scores, broadcastable to [batch, heads, q_length, kv_length] (T5).
        **kwargs: What an indexer selected, see `selected_mask`, and arguments that change nothing, see `HARMLESS`.
    """
    refuse_unknown(module, kwargs)
    attention_mask = selected_mask(module, attention_mask, kwargs, key.shape[2], query.dtype)
    batch, heads, q_length, _ = query.shape
    kv_heads, kv_length = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    scores = scores_of(query, key, scaling, softcap)
    if attention_mask is None and _causal_without_mask(module, q_length, is_causal):
        attention_mask = torch.ones(q_length, kv_length, dtype=torch.bool, device=query.device).tril()[None, None]
    for addend in (attention_mask, position_bias):
        if addend is not None:
            scores = with_addend(scores, addend)
    if s_aux is not None:
        sinks = s_aux.reshape(1, kv_heads * groups, 1, 1).expand(batch, -1, q_length, 1)
    if sinks is not None:
        scores = torch.cat([scores, by_group(sinks, kv_heads, groups).to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    if dropout:
        weights = F.dropout(weights, p=dropout, training=module.training)
    weights = reshaped(weights, batch * kv_heads, groups * q_length, kv_length)
    output = torch.bmm(weights, reshaped(value, batch * kv_heads, kv_length, value.shape[-1]))
    output = reshaped(output, batch, heads, q_length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `EXTENDED_ATTENTION` in plain operators."""
    if sinks is not None:
        sinks = sinks.expand(query.shape[0], -1, query.shape[2], 1)
    output, _ = matmul_attention(
        torch.nn.Identity(), query, key, value, mask, scaling=scale, softcap=softcap, sinks=sinks
    )
    return output.transpose(1, 2)


library.impl("extended_attention", _plainly, "CompositeImplicitAutograd")


def scores_of(
    query: torch.Tensor, key: torch.Tensor, scaling: float | None = None, softcap: float | None = None
) -> torch.Tensor:
    """Return products of queries and keys, [batch, kv_heads, groups, q_length, kv_length]; see `matmul_attention`."""
    batch, heads, q_length, head_dim = query.shape
    kv_heads, kv_length = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    scaling = head_dim**-0.5 if scaling is None else scaling
    folded = reshaped(query * scaling, batch * kv_heads, groups * q_length, head_dim)
    key = reshaped(key, batch * kv_heads, kv_length, head_dim)
    scores = torch.bmm(key, folded.transpose(1, 2)).transpose(1, 2)
    scores = scores.reshape(batch, kv_heads, groups, q_length, kv_length)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def with_addend(scores: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Add a mask or bias to scores.

    Args:
        scores: [batch, kv_heads, groups, q_length, kv_length].
        addend: Additive or bool, [batch, heads or 1, q_length, kv_length].
    """
    if addend.dtype == torch.bool:
        addend = torch.where(addend, 0.0, torch.finfo(scores.dtype).min)
    return scores + by_group(addend, scores.shape[1], scores.shape[2]).to(scores.dtype)


def refuse_unknown(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that ask for a kind of attention that is not computed here.

    None, False and an empty mapping ask for nothing. Only names that the model's code itself passes to attention are
    refused, because a caller's further arguments reach attention too, and transformers' own ignores them.

    Args:
        module: The attention module of the model.
        arguments: Arguments by name.

    Raises:
        UnsupportedModelError: If one is refused.
    """
    for name, value in arguments.items():
        if isinstance(value, Mapping) and not value:
            continue
        if value is None or value is False or name in HARMLESS or name in EXTRAS or name in SELECTIONS:
            continue
        if name in passed_to_attention(type(module).__module__):
            raise UnsupportedModelError(
                f"the model passes {name!r} to attention, which this package's attention does not know; use its own "
                "(attn_implementation='eager') with DynamicCache"
            )


@functools.cache
def passed_to_attention(module: str) -> frozenset[str]:
    """Return the keywords that the code of a modeling module passes to attention functions by name.

    These are the keywords of its calls of functions named after attention, and the keys that it adds to `kwargs`.

    Args:
        module: Name of a module that is imported.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _CALLED.search(ast.unparse(node.func)):
            names.update(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.slice, ast.Constant)
            and "kwargs" in ast.unparse(node.value)
        ):
            names.add(str(node.slice.value))
    return frozenset(names)


def selected_mask(
    module: Any,
    attention_mask: torch.Tensor | None,
    arguments: Mapping[str, Any],
    kv_length: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Return a mask of the keys that an indexer selected for each query and that the mask shows.

    Transformers folds the selection into the mask for its own `eager` and `sdpa`; other functions get the selection:

    - `indices`: slots, integers [batch, q_length, number] (DeepSeek V3.2, GLM MoE DSA);
    - `block_indices`: blocks of slots, integers [batch, index_heads, q_length, number], -1 for none (MiniMax M3).
      Query heads are divided among the indexer's heads in order.

    Args:
        module: Attention module of the model; its `indexer` has the size of a block.
        attention_mask: Additive or bool, broadcastable to [batch, heads, q_length, kv_length], or None.
        arguments: Arguments of attention by name.
        kv_length: Number of keys.
        dtype: Dtype of the result.

    Returns:
        The mask unchanged without a selection, else an additive mask [batch, heads or 1, q_length, kv_length].
    """
    lowest = torch.finfo(dtype).min
    if arguments.get("indices") is not None:
        selected = _marked(arguments["indices"], kv_length, dtype)[:, None]
    elif arguments.get("block_indices") is not None:
        blocks: Any = arguments["block_indices"]
        size, heads = module.indexer.block_size, module.config.num_attention_heads
        count = -(-kv_length // size)
        # An extra block takes the marks of the indices that select none.
        selected = _marked(torch.where(blocks < 0, count, blocks), count + 1, dtype)
        slots = torch.arange(kv_length, device=blocks.device)
        selected = selected.index_select(-1, torch.div(slots, size, rounding_mode="floor"))
        batch, index_heads, q_length, _ = blocks.shape
        shape = (batch, index_heads, heads // index_heads, q_length, kv_length)
        selected = reshaped(selected[:, :, None].expand(shape), batch, heads, q_length, kv_length)
    else:
        return attention_mask
    if attention_mask is None:
        return selected
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, lowest)
    return torch.minimum(attention_mask.to(dtype), selected)


def _marked(indices: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [..., count] of the lowest value, and 0 at the indices [..., number]."""
    marked = torch.full((*indices.shape[:-1], count), torch.finfo(dtype).min, dtype=dtype, device=indices.device)
    return marked.scatter(-1, indices.to(torch.int64), 0.0)


def _causal_without_mask(module: torch.nn.Module, q_length: int, is_causal: bool | None) -> bool:
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Compared last, because under dynamic shapes the length is symbolic, and it may be evaluated only if causality
    # matters.
    return bool(is_causal and q_length > 1)


def by_group(addend: torch.Tensor, kv_heads: int, groups: int) -> torch.Tensor:
    """Reshape [batch, heads or 1, q, kv] to [batch, kv_heads or 1, groups or 1, q, kv]."""
    if addend.shape[1] == 1:
        return addend[:, :, None]
    return addend.reshape(addend.shape[0], kv_heads, groups, addend.shape[2], addend.shape[3])


def _fold_mask(mask: torch.Tensor, kv_heads: int, groups: int, q_length: int) -> torch.Tensor:
    """Return the mask of queries folded into their key head: [batch, kv_heads or 1, groups * q_length or 1, kv].

    Its width is that of aligned keys if it `is_unaligned`.
    """
    if is_unaligned(mask):
        mask = aligned_mask(mask)
    if groups == 1:
        return mask
    grouped = by_group(mask, kv_heads, groups)
    if q_length == 1 and grouped.shape[2] == 1:
        return grouped[:, :, 0]
    batch, heads, _, _, kv_length = grouped.shape
    grouped = grouped.expand(batch, heads, groups, q_length, kv_length)
    return reshaped(grouped, batch, heads, groups * q_length, kv_length)


def reshaped(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """Reshape a tensor, on a GPU by way of one dimension.

    When torch merges dimensions of symbolic sizes, it takes the smaller stride, `min(keys, queries * keys)`. The
    comparison becomes a guard on the length, which a graph for every length may not have.
    """
    return tensor.reshape(shape) if tensor.device.type == "cpu" else tensor.reshape(-1).view(shape)


def register_attention() -> None:
    """Register both attention functions and their mask function with transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION, fused_attention)
    AttentionInterface.register(MATMUL_ATTENTION, matmul_attention)
    register_masks(*ATTENTION_NAMES)
