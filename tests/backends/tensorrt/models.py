"""The models that TensorRT programs are tested with: those every test knows, and two whose layers differ in kind."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...support.models import tiny_model

_MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Multi-head latent attention: keys and values of different sizes.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
}


def engine_model(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model, see `tiny_model`."""
    return tiny_model(family, dtype, **{**_MORE.get(family, {}), **overrides})
