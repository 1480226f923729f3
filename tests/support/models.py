"""Tiny random models with enough spread in their weights that logits are not tied and mistakes show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 8
VOCAB = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.125,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
#: With the table as head, these models repeat one token, whatever the cache holds.
UNTIED = {"tie_word_embeddings": False}

#: Config fields by model type, past the common sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Positions for the tests of ten thousand steps.
    "mistral": {"sliding_window": WINDOW, "max_position_embeddings": 16384},
    "gemma2": {
        **_HYBRID,
        **UNTIED,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {**_HYBRID, **UNTIED, "query_pre_attn_scalar": 8},
    "qwen3": {},
    "phi3": {"sliding_window": WINDOW, "tie_word_embeddings": False},
    "gpt_oss": {**_HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {**_HYBRID, **UNTIED, "logit_scale": 1.0},
    "olmo3": {**_HYBRID},
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A two-layer random model of a family, in eval mode, with every parameter off its initial zero or one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def hybrid_model(**overrides: Any) -> PreTrainedModel:
    """Return a model of a ring and a full layer with the fewest operators, for what is slow to trace or to lower."""
    return tiny_model("qwen2", **{**_HYBRID, "use_sliding_window": True, **overrides})


def among(names: Iterable[str], fast: Collection[str]) -> list[Any]:
    """Parameters of a product: those named are always run, the others with the full lane."""
    names = list(names)
    assert set(fast) <= set(names), f"{sorted(set(fast) - set(names))} are not in the product"
    return [name if name in fast else pytest.param(name, marks=pytest.mark.full) for name in names]


def tokens(count: int, batch_size: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 [batch_size, count], clear of the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch_size, count), generator=generator)
