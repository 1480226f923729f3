"""The oracle of every test: the model in eager mode with `DynamicCache`, teacher-forced."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

from exportable_cache.common.compat.transformers import cache_argument

Step = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits after the prompt and after each later token: [batch, ids.shape[1] - prompt + 1, vocab].

    Args:
        ids: int64 [batch, length]; the first `prompt` columns are fed at once, the others one by one.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        options = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        rows = [model(ids[:, :prompt], **options).logits[:, -1]]
        for position in range(prompt, ids.shape[1]):
            rows.append(model(ids[:, position : position + 1], **options).logits[:, -1])
    finally:
        model.set_attn_implementation(implementation)
    return torch.stack(rows, dim=1)


def fed(ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """The same feed as `reference_logits`: the prompt, then token by token."""
    yield ids[:, :prompt]
    for position in range(prompt, ids.shape[1]):
        yield ids[:, position : position + 1]


@torch.no_grad()
def difference(step: Step, reference: torch.Tensor, ids: torch.Tensor, prompt: int) -> float:
    """Largest |logit difference| between `step(ids [batch, n]) -> [batch, vocab]` and the reference."""
    rows = torch.stack([step(piece) for piece in fed(ids, prompt)], dim=1)
    assert rows.shape == reference.shape
    return (rows - reference).abs().max().item()
