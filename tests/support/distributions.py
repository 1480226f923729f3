"""The distribution that transformers draws a token from, and a chi-square test of draws against it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from .models import tiny_model

#: Settings of sampling that a generation config may have, with `do_sample`.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    {"temperature": 1.5, "top_k": 0, "min_p": 0.1},
    {},
]
#: Fewest draws that a category is expected to have; rarer tokens are counted together.
_LEAST = 5.0
#: Quantile of the normal distribution: a right sampler exceeds it once in 30,000 tests. Seeds are fixed, so a test that
#: passes always passes.
_QUANTILE = 4.0


def expected_probabilities(prompt: torch.Tensor, logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return the probabilities [vocab] after a prompt [1, length], by transformers' own processors.

    Args:
        prompt: Token ids.
        logits: Logits of the next token, [1, vocab].
        settings: Settings of the generation config besides `do_sample`.
    """
    model = tiny_model("llama", vocab_size=logits.shape[-1])
    model.generation_config = GenerationConfig(do_sample=True, **settings)
    config, _ = model._prepare_generation_config(None)
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt.shape[1],
        encoder_input_ids=prompt,
        prefix_allowed_tokens_fn=None,
        logits_processor=[],
        device="cpu",
        model_kwargs={},
    )
    return processors(prompt, logits.clone().float())[0].double().softmax(dim=-1)


def check_draws(drawn: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Check by a chi-square test that tokens, int64 [draws], were drawn from probabilities [vocab]."""
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    assert not counts[probabilities == 0].any(), "a token was drawn that has no probability"
    expected = probabilities * len(drawn)
    often = expected >= _LEAST
    if expected[~often].sum() >= _LEAST:
        counts = torch.cat([counts[often], counts[~often].sum()[None]])
        expected = torch.cat([expected[often], expected[~often].sum()[None]])
    else:
        counts, expected = counts[often], expected[often]
    degrees = len(expected) - 1
    assert degrees >= 3, f"the test needs some tokens of probability, got {degrees + 1}"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # The quantile of chi-square by Wilson and Hilferty (1931).
    spread = 2 / (9 * degrees)
    limit = degrees * (1 - spread + _QUANTILE * spread**0.5) ** 3
    assert statistic <= limit, f"chi-square is {statistic:.1f}, above {limit:.1f} with {degrees} degrees of freedom"
