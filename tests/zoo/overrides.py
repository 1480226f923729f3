"""Config fields that the rules of `shrink.py` do not reach, by model type (sub-configs have one of their own).

`_base` goes to the default config that the rules start from, where that cannot be built without it.
"""

from __future__ import annotations

from typing import Any

_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_SHARED_KV = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}

_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 32, "mamba_n_heads": 4},
    "granitemoehybrid": {**_LINEAR_AND_FULL, "mamba_d_head": 32, "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2, "num_hidden_layers": 3, "mamba_dt_rank": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dory": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "hy_v4_vl_text": {
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
    },
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "gemma3n_text": {
        **_SHARED_KV,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {**_SHARED_KV, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    # Windows of every kind that are complete within a test.
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    # Its weights are halved once more for each so many layers.
    "rwkv": {"rescale_every": 1},
    # Its default is a masked language model; those that generate are causal.
    "xlm": {"causal": True},
    # Of 64 it would make its own cache for heads that it does not have.
    "xlstm": {"chunk_size": 64, "hidden_size": 128, "embedding_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "eos_token_id": 2,
    },
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "electra": {"embedding_size": 32},
    # Kinds of layers that come too seldom for two layers: without positions, with experts, within a block.
    **dict.fromkeys("llama4_text smollm3".split(), {"no_rope_layers": [1, 0]}),
    # Layers that read another layer's keys, one with an indexer and one without.
    "mistral_large4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "no_rope_layers": [1, 1, 1, 0],
        "kv_source_layers": [0, 0, 0, 3],
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "flint": {"mlp_only_layers": [0]},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5gemma2_text": {"layer_types": ["sliding_attention", "full_attention"]},
    # Encoders that attend within blocks: several of them.
    "longt5": {"local_radius": 3},
    "pegasus_x": {"block_size": 4},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    # multimodal: rotary sections that the modeling code assumes where the config states none
    **{
        f"{name}_text": {"_mrope": [2, 3, 3]}
        for name in "glm4v glm4v_moe glm_ocr paddleocr_vl qwen2_vl qwen2_5_vl qwen2_5_omni hunyuan_vl".split()
    },
    # multimodal: towers
    "chameleon": {"vocabulary_map": {"<image>": 9, "IMGIMGA": 10}},
    "emu3": {"vocabulary_map": {"<image>": 9, "<|extra_200|>": 10, "<|visual token 000000|>": 11}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "fast_vlm": {"vision_config": _SIGLIP},
    "ernie4_5_vl_moe_text": {"_mrope": [3, 3, 2]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "inkling2_text": {
        "logits_mup_width_multiplier": 1.0,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid_sliding", "hybrid"],
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 2,
    },
    # One block before those that are looped, one of these, and one behind.
    "inkling2_loop_text": {
        "logits_mup_width_multiplier": 1.0,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "num_hidden_layers": 6,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_gate_rank": 8,
    },
    "inkling_vision": {"num_hidden_layers": 2, "patch_size": 4},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [8, 8, 8, 64], "depths": [1, 1, 1, 1]},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 64},
    "lfm3_vl_vision": {"layer_types": ["conv", "full_attention"]},
    **dict.fromkeys(
        "sam_vision_model got_ocr2_vision unlimited_ocr_sam_vision_model".split(), {"global_attn_indexes": [1]}
    ),
    # As wide behind its four stages as the decoder; images are higher than wide.
    "donut-swin": {"image_size": [128, 64], "embed_dim": 8, "window_size": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "mimi": {"upsample_groups": 8},
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
    },
    "radio": {"video_temporal_patch_size": 2},
    "speecht5": {"vocab_size": 128},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "dia_decoder": {"cross_hidden_size": 64},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "pp_formulanet": {"initializer_range": 0.125},
    "pp_formulanet_vision": {
        "global_attn_indexes": [1],
        "image_size": 128,
        "output_channels": 32,
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 32,
        "post_conv_out_channels": 32,
    },
    "glm5_next_text": {"index_kpool": 2},
    # As published; the default has full attention in every layer.
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "step3p5": {
        "sliding_window": 8,
        "num_sliding_attention_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron_h_omni": {"video_temporal_patch_size": 2},
    # Experts of factors 2.5 and 5 drown what the first token changes.
    "nemotron_h": {"routed_scaling_factor": 0.25},
}
