"""Find out whether one compiled decode step can serve every length, because attention reads the filled slots only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...cache.attention.functions import EXTRAS
from ...cache.attention.operators import EXTENSIONS, can_compute, can_store
from ...cache.policies import FullPolicy
from ...models.cache_factory import ExportableCache, ExportableEncoderDecoderCache
from ...models.patches.mechanisms.fused_attention import can_absorb
from ..probe_attention import probe_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...program.methods import ProgramMethod

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
