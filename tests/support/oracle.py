"""The oracle of every test: the model in eager mode without a cache, over all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

Step = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits after the prompt and after each later token: [batch, ids.shape[1] - prompt + 1, vocab].

    Args:
        model: The model.
        ids: int64 [batch, length], of which the first `prompt` columns are the prompt.
        prompt: Tokens of the prompt.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(ids, use_cache=False).logits[:, prompt - 1 :]
    finally:
        model.set_attn_implementation(implementation)


def fed(ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Yield the prompt, and then each later token."""
    yield ids[:, :prompt]
    for position in range(prompt, ids.shape[1]):
        yield ids[:, position : position + 1]


@torch.no_grad()
def difference(step: Step, reference: torch.Tensor, ids: torch.Tensor, prompt: int) -> float:
    """Largest |logit difference| between `step(ids [batch, n]) -> [batch, vocab]` and the reference."""
    rows = torch.stack([step(piece) for piece in fed(ids, prompt)], dim=1)
    assert rows.shape == reference.shape
    return (rows - reference).abs().max().item()
