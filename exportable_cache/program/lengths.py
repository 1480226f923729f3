"""Graphs shared by methods that differ in read length, and models whose rows must have equal length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..cache.attention import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.layers import CacheLayer
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.layers.specs import codebooks_of
from .methods import KV_SLOTS, ProgramMethod
from .program import ResidentModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Granularity of read lengths, in slots. A finer one would save less than the variance of a step's time.
READ_STEP = 128


def shared_methods(cache: ExportableCache, methods: Mapping[str, ProgramMethod]) -> dict[str, ProgramMethod]:
    """Return, for each method that can share a compiled graph, the method to compile that graph from.

    The shared method also takes `KV_SLOTS`, and reads up to the longest read length in its group. Methods share a graph
    if the same layers are read partially and the same ring buffers may have wrapped.

    Args:
        cache: The program's cache.
        methods: The program's methods, by name.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayer)]
    policies = [layer.policy for layer in layers if layer.policy.keeps_keys and layer.policy.follows_decoder]
    groups: dict[tuple, list[tuple[int, ProgramMethod]]] = {}
    for method in methods.values():
        read = cache.max_length if method.kv_read_len is None else method.kv_read_len
        if not method.is_step or read is None:
            continue
        kinds = tuple((policy.wraps(read), policy.reads_up_to(read)) for policy in policies)
        if any(reads for _, reads in kinds):
            same = (
                method.inputs,
                method.min_length,
                tuple(method.ranges.items()),
                method.scored_tokens > 0,
                method.multiple,
            )
            groups.setdefault((kinds, same), []).append((read, method))
    shared: dict[str, ProgramMethod] = {}
    for members in groups.values():
        if len(members) < 2:
            continue
        longest, widest = max(members, key=lambda member: member[0])
        # Reading every slot of a layer gives a contiguous tensor, which would need a second graph because of the guard.
        most = longest - any(policy.reads_up_to(longest) and policy.capacity == longest for policy in policies)
        wide = replace(
            widest,
            max_length=max(method.max_length for _, method in members),
            kv_read_len=longest,
            inputs=(*widest.inputs, KV_SLOTS),
            ranges={**widest.ranges, KV_SLOTS.name: (2, most)},
        )
        shared |= {method.name: wide for _, method in members}
    return shared


def slots_to_read(shared: ProgramMethod, end: int, compiled_for: int | None) -> int | None:
    """Return how many slots a step of a shared method reads, or None if it has to read all.

    Args:
        shared: A method from `shared_methods`.
        end: Length of the longest row after the step, in tokens.
        compiled_for: Number of new tokens if this step triggers compilation, else None. The result then differs from
            it, because TorchDynamo specialises on sizes that are equal in the first call.
    """
    most = shared.ranges[KV_SLOTS.name][1]
    if end > most:
        return None
    slots = min(-(-end // READ_STEP) * READ_STEP, most)
    if slots != compiled_for:
        return slots
    return slots + 1 if slots < most else slots - 1 if slots > max(end, 2) else None


_SLOTS = 8


@torch.no_grad()
def needs_equal_rows(model: PreTrainedModel, cache: ExportableCache) -> bool:
    """Return True if the model's code assumes that all rows of the cache have the same length.

    A traced step would silently use the first row's length for every row. So this feeds one token to two rows of
    different length over a small cache and checks if that is refused.

    Args:
        model: The model, in eval mode.
        cache: Its cache; with a batch size of 1 the answer is False.
    """
    if cache.batch_size == 1:
        return False
    if any(layer.policy.keeps_prompt for layer in cache.layers):
        # Rows that start later are prefilled in different chunks, some of a single token.
        return True
    if isinstance(cache, ExportableEncoderDecoderCache):
        # For example, the relative positions of the T5 family use one length.
        return True
    small = ExportableCache.from_model(model, _SLOTS, 2, attn_implementation=None)
    step = ResidentModule(model, small, ProgramMethod("decode", 1, 1))
    codebooks = codebooks_of(model.config)
    shape = (2, 1) if codebooks is None else (2, 1, codebooks.count)
    token = torch.zeros(shape, dtype=torch.int64, device=small.device)
    with attention_of(model, ATTENTION):
        try:
            step(token, torch.tensor([0, 1], device=small.device))
        except Exception:  # `RowsDifferError`, or model code that cannot handle rows of different length
            return True
    return False
