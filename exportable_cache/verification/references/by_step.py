"""The reference of a model that is not large: the eager model itself, step by step, over a cache that grows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ...cache.attention.implementation import attention_of
from ...models.layout import cache_argument, vocab_size_of
from ...models.rope import lengths_forgotten, rope_rule
from ...models.support import RIGHT_BY_TOKEN
from ...program.program import takes_positions
from .encoder_decoder import decoder_of
from .own_state import check_plain_cache, logits_of_itself, takes_no_cache
from .rounding import RoundingCache
from .sinks import evicting_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...cache.spec import Sinks
    from ...cache.storage import Storage

# The reference takes longer prompts in pieces: eager attention keeps heads x length x length scores.
_REFERENCE_CHUNK = 1024


@torch.no_grad()
def logits_by_step(
    model: PreTrainedModel,
    ids: torch.Tensor,
    prompt: int,
    sinks: Sinks | None,
    encoder_inputs: dict[str, torch.Tensor] | None = None,
    storage: Storage | None = None,
) -> Iterator[torch.Tensor]:
    """Logits [batch, vocab] after the prompt and after each later token of `ids` [batch, length]."""
    ids = ids.to(model.device)
    if encoder_inputs is not None:
        with attention_of(model, "eager"), lengths_forgotten(model):
            decoder = decoder_of(model, encoder_inputs)
            for piece in ids[:, :prompt].split(1 if model.config.model_type in RIGHT_BY_TOKEN else prompt, dim=1):
                logits = decoder(piece)
            yield logits.clone()
            for position in range(prompt, ids.shape[1]):
                yield decoder(ids[:, position : position + 1])
        return
    if takes_no_cache(model):
        check_plain_cache(model, attention_sinks=sinks, kv_dtype=storage)
        yield from logits_of_itself(model, ids, prompt)
        return
    plain = DynamicCache if storage is None else partial(RoundingCache, storage)
    cache = plain(config=model.config) if sinks is None else evicting_cache(model.config, sinks, plain)
    for layer in cache.layers:
        if hasattr(layer, "set_prefill_length"):
            # The prompt comes in pieces (Unlimited OCR).
            layer.set_prefill_length(prompt)
    one_by_one = sinks is not None or model.config.model_type in RIGHT_BY_TOKEN
    # The length of a call chooses the factors of such RoPE.
    whole = rope_rule(model) is not None
    chunk = 1 if one_by_one else prompt if whole else _REFERENCE_CHUNK
    argument, explicit = cache_argument(model), takes_positions(model)

    def logits_of(start: int, end: int) -> torch.Tensor:
        options: dict[str, Any] = {argument: cache}
        if explicit:
            options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
        return model(ids[:, start:end], use_cache=True, **options).logits[:, -1]

    with attention_of(model, "eager"), lengths_forgotten(model):
        for start in range(0, prompt, chunk):
            last = logits_of(start, min(start + chunk, prompt))
        yield last.clone()
        for position in range(prompt, ids.shape[1]):
            yield logits_of(position, position + 1)


@torch.no_grad()
def rounding_effect(model: PreTrainedModel, length: int, storage: Storage) -> float:
    """Largest |logit difference| that keeping keys and values in `storage` makes over `length` random tokens."""
    ids = torch.randint(vocab_size_of(model), (1, length), generator=torch.Generator().manual_seed(0))
    logits = []
    with attention_of(model, "eager"), lengths_forgotten(model):
        for cache in (DynamicCache(config=model.config), RoundingCache(storage, config=model.config)):
            caches = {cache_argument(model): cache}
            logits.append(model(ids.to(model.device), use_cache=True, **caches).logits.float())
    return (logits[0] - logits[1]).abs().max().item()
