"""Tiny models of every kind of cache layer, past full and sliding attention."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .models import UNTIED, WINDOW, tiny_model

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SSD: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": WINDOW,
}  # fmt: skip

#: Config fields by model type, and the labels of the layers that its cache has.
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama4_text": (
        {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0], "num_local_experts": 4, "moe_layers": [1], "floor_scale": 4,
         "intermediate_size_mlp": 64},
        ["ring", "full"],
    ),
    "deepseek_v3": (_MLA, ["full"] * 2),
    # Many index heads: where all of them are zero, scores tie, and which tokens are chosen is undefined.
    "deepseek_v32": ({**_MLA, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}, ["full + indexer"] * 2),
    "gemma3n_text": (
        {**_SHARED, **UNTIED, "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
        ["ring", "full", "none", "none"],
    ),
    "gemma4_text": ({**_SHARED, "global_head_dim": 16}, ["ring", "full", "none", "none"]),
    "lfm2": (
        {**UNTIED, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        ["recurrent", "full"],
    ),
    "mamba": ({**UNTIED, "state_size": 8}, ["recurrent"] * 2),
    "mamba2": (
        {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": WINDOW, "expand": 2}, ["recurrent"] * 2,
    ),
    "jamba": (
        {"mamba_d_state": 8, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        ["recurrent", "full"],
    ),
    "bamba": ({**_SSD, "attn_layer_indices": [1]}, ["recurrent", "full"]),
    "falcon_h1": ({**_SSD, "mamba_d_ssm": 64}, ["full + states"] * 2),
    "qwen3_next": (
        {**_DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16},
        ["recurrent", "full"],
    ),
    "nemotron_h": (
        {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 8,
         "ssm_state_size": 8, "n_groups": 2, "chunk_size": WINDOW},
        ["recurrent", "full", "none"],
    ),
}  # fmt: skip


def kind_model(family: str) -> PreTrainedModel:
    """A tiny model of one of `KINDS`."""
    return tiny_model(family, **KINDS[family][0])
