"""The reference of a large model: one sequence as a whole, and every prompt a beginning of it.

A call of a model of a billion weights takes seconds, whether for one token or for hundreds, so a reference that takes
four prompts and the steps after them one by one takes minutes. The logits of a beginning are the sequence's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from ...cache.attention.implementation import attention_of
from ...models.layout import cache_argument
from ...models.quantized_rows import QuantizedRows
from ...models.support import RIGHT_BY_TOKEN
from ...program.program import takes_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Of a model whose reference takes tokens one by one, as the program does.
MOST_PARAMETERS = 100_000_000
# Eager attention keeps heads x length x length scores.
_CHUNK = 1024


def is_large(model: PreTrainedModel) -> bool:
    """Whether a reference by single steps would take minutes."""
    return sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS


@torch.no_grad()
def logits_of_beginnings(
    model: PreTrainedModel, ids: torch.Tensor, plan: Sequence[tuple[int, int]]
) -> dict[int, torch.Tensor]:
    """Logits [batch, vocab] by position, in eager attention with `DynamicCache`.

    Args:
        model: A text decoder.
        ids: int64 [batch, length].
        plan: Length of each beginning, and steps after it: the positions to keep.
    """
    kept = sorted({position for length, steps in plan for position in range(length - 1, length + steps)})
    cache = DynamicCache(config=model.config)
    found: dict[int, torch.Tensor] = {}
    ids = ids.to(model.device)
    with attention_of(model, "eager"), QuantizedRows():
        chunk = 1 if model.config.model_type in RIGHT_BY_TOKEN else _CHUNK
        for start in range(0, ids.shape[1], chunk):
            end = min(start + chunk, ids.shape[1])
            positions = [position for position in kept if start <= position < end]
            options: dict[str, Any] = {cache_argument(model): cache}
            if takes_positions(model):
                options["position_ids"] = torch.arange(start, end, device=ids.device).expand(ids.shape[0], -1)
            places = torch.tensor([one - start for one in positions], dtype=torch.int64, device=ids.device)
            selects = "logits_to_keep" in inspect.signature(model.forward).parameters
            if selects:
                # A vocabulary is large: logits of every token of a chunk would be a gigabyte.
                options["logits_to_keep"] = places if positions else 1
            logits = model(ids[:, start:end], use_cache=True, **options).logits
            if not selects:
                logits = logits[:, places]
            found |= dict(zip(positions, logits.unbind(1)))
    return found
