"""Methods that differ only in their read length, and whether rows may differ in length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..cache.attention import ATTENTION
from ..cache.attention.implementation import attention_of
from ..cache.layers import CacheLayer
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.layers.codebooks import codebooks_of
from .methods import KV_SLOTS, ProgramMethod
from .program import ResidentModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Slots are read by as many: fewer would save less than the time of a step varies by.
READ_STEP = 128


def shared_methods(cache: ExportableCache, methods: Mapping[str, ProgramMethod]) -> dict[str, ProgramMethod]:
    """Of each method that one graph can serve along with others, what that graph is compiled from.

    It reads up to the longest read length of its members, but not all slots of a layer, and takes `KV_SLOTS` besides.
    Members see the same layers read as far as they are told, and the same ones as rings that may have wrapped.

    Args:
        cache: That they run over.
        methods: Of a program, by name.
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
        # All slots of a layer are contiguous where fewer are not, which TorchDynamo asks: a graph of its own.
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
    """How many slots a step of a shared method reads, None if it has to read all.

    Args:
        shared: See `shared_methods`.
        end: Tokens that the longest row holds after it.
        compiled_for: New tokens of the step, if the graph is to be compiled from it: TorchDynamo takes sizes that are
            equal then for equal ever after.
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
    """Whether the model's own code asks its cache for one length of all rows, so that rows must hold as many tokens.

    Eager steps over rows that differ are refused then. A traced step would take the first row's length for all of them,
    silently. So one token is fed to two rows of different length, over a cache of a few slots.

    Args:
        model: In eval mode.
        cache: Its cache; at one row nothing is asked.
    """
    if cache.batch_size == 1:
        return False
    if any(layer.policy.keeps_prompt for layer in cache.layers):
        # Rows that begin later get their prompts in other pieces, of one token some of them.
        return True
    if isinstance(cache, ExportableEncoderDecoderCache):
        # The relative positions of T5's family, for one.
        return True
    small = ExportableCache.from_model(model, _SLOTS, 2, attn_implementation=None)
    step = ResidentModule(model, small, ProgramMethod("decode", 1, 1))
    codebooks = codebooks_of(model.config)
    shape = (2, 1) if codebooks is None else (2, 1, codebooks.count)
    token = torch.zeros(shape, dtype=torch.int64, device=small.device)
    with attention_of(model, ATTENTION):
        try:
            step(token, torch.tensor([0, 1], device=small.device))
        except Exception:  # `RowsDifferError`, or code of the model's own that cannot tell rows apart
            return True
    return False
