"""Find out how a model's attention uses the keys of each layer, by running a few tokens.

If it is the operator over filled slots everywhere, one compiled decode step serves every length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from ..cache.attention.functions import EXTRAS, matmul_attention
from ..cache.attention.implementation import attention_of
from ..cache.attention.latents import expanded_latents
from ..cache.attention.masks import register_masks
from ..cache.attention.operators import EXTENSIONS, can_compute, can_store
from ..cache.policies import FullPolicy
from ..common.compat.transformers import cache_argument
from ..models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ..models.draft_heads import collecting_hidden, draft_head_of
from ..models.layers.specs import probe_tokens
from ..models.patches.mechanisms.fused_attention import can_absorb
from ..models.positions import text_model_of
from ..models.quantized_rows import QuantizedZeros

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ..program.methods import ProgramMethod

_ATTENTION = "exportable_cache_probe"
#: Number of tokens: enough to recognize a causal mask, and shorter than any window.
_LENGTH = 3

#: A function of one attention call: query, key, value, attention mask, other arguments.
Look = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]], Any]


@torch.no_grad()
def probe_attention(model: PreTrainedModel, look: Look, latents: bool = False) -> dict[int, list[Any]]:
    """Return the result of `look` for each attention call over the keys and values that a full layer returned.

    Args:
        model: A causal language model. Its attention implementation is restored afterwards.
        look: Called with the inputs of an `AttentionInterface` function, and the module in the other arguments. Weights
            of quantized models are zeros, so that only shapes and masks are valid.
        latents: Make models with latent attention pass latents instead of the keys and values expanded from them.

    Returns:
        By layer, one entry for each call over its keys; False if the values were not the layer's. Layers without keys,
        or whose keys were changed before the call, are left out.
    """
    calls: dict[int, list[Any]] = {}
    probe = ExportableCache.from_model(model, _LENGTH, attn_implementation=None)

    def record(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for index, layer in enumerate(probe.layers):
            if isinstance(layer.policy, FullPolicy) and key is layer.keys:
                given = {**kwargs, "module": module}
                calls.setdefault(index, []).append(
                    value is layer.values and look(query, key, value, attention_mask, given)
                )
                if latents and hasattr(module, "expand_kv"):
                    key, value = expanded_latents(module, key, value)
                    break
        return matmul_attention(module, query, key, value, attention_mask, **kwargs)

    recorder: Any = record
    recorder.takes_latents = lambda keys: latents and any(keys is layer.keys for layer in probe.layers if layer.storage)
    AttentionInterface.register(_ATTENTION, record)
    register_masks(_ATTENTION)
    with attention_of(model, _ATTENTION), QuantizedZeros():
        text_model, head = text_model_of(model), draft_head_of(model)
        ids = probe_tokens(text_model, _LENGTH)
        with collecting_hidden() as hidden, nullcontext() if head is None else head.restored():
            text_model(input_ids=ids, use_cache=True, **{cache_argument(text_model): probe})
            if head is not None:
                head.follow(ids, torch.zeros(1, dtype=torch.int64, device=ids.device), probe, hidden)
    return calls


def is_causal(attention_mask: torch.Tensor) -> bool:
    """Return True if an additive mask [1, 1 or heads, query_length, key_length] hides exactly the later tokens."""
    causal = torch.ones(attention_mask.shape[-2:], dtype=torch.bool).tril()
    return bool(((attention_mask == 0) == causal).all())


log = logging.getLogger(__name__)


def reads_filled_everywhere(model: PreTrainedModel, cache: ExportableCache) -> bool:
    """Return True if every full layer's attention in a decode step is the operator of `cache.attention.operators`.

    Args:
        model: The model, which runs a few tokens.
        cache: Its cache.
    """
    full = [index for index, layer in enumerate(cache.layers) if isinstance(layer.policy, FullPolicy)]
    # An encoder-decoder needs more than tokens to run.
    if (
        cache.ranks is not None
        or isinstance(cache, ExportableEncoderDecoderCache)
        or not all(can_store(cache.layers[index].storage) for index in full)
    ):
        return False
    try:
        calls = probe_attention(model, _is_plain, latents=True)
    except Exception as error:  # of a model's code; the session then has more graphs
        log.info("decode steps are compiled for each read length, because a few tokens cannot be run: %s", error)
        return False
    return all(calls.get(index) and all(calls[index]) for index in full)


def _is_plain(query: Any, key: Any, value: Any, mask: Any, given: Mapping[str, Any]) -> bool:
    extras = {name for name in EXTRAS if given.get(name) is not None}
    of_latents = hasattr(given["module"], "expand_kv")
    can = not of_latents or can_absorb(given["module"])
    return can and extras <= EXTENSIONS and can_compute(key.shape[3], value.shape[3], of_latents)


def without_narrow_decodes(methods: Mapping[str, ProgramMethod]) -> dict[str, ProgramMethod]:
    """Return the methods without the decode steps that read fewer slots, because each would be a graph of its own."""
    return {
        name: method
        for name, method in methods.items()
        if not (method.is_step and method.max_length == 1 and method.kv_read_len is not None)
    }
