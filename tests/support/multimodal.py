"""Tiny random models that read images or sound, prompts for them, and their own answers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    DynamicCache,
    Gemma3ForConditionalGeneration,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    SmolVLMForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from .models import VOCAB, WINDOW, tokens

PLACEHOLDER = VOCAB - 1
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.125,
    # Defaults of some configs lie outside of this vocabulary.
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


#: Kind, embeddings per item and options of a session or an export, by family. The tokens of a Gemma image outnumber its
#: window.
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llava": ("image", 4, {}),
    "smolvlm": ("image", 4, {}),
    "voxtral": ("audio", 3, {}),
    "gemma3": ("image", 16, {"prefill_chunk": 20}),
    # 4 by 6 patches: 2 rows of 3 embeddings, and windows of 2 by 2 of which the last is narrower.
    "qwen2_5_vl": ("image", 6, {"image_size": (16, 24)}),
    "qwen2_vl": ("image", 6, {"image_size": (16, 24)}),
    "qwen3_vl": ("image", 6, {"image_size": (16, 24)}),
}


def tiny_multimodal(family: str) -> PreTrainedModel:
    """A random model of one of `FAMILIES`."""
    torch.manual_seed(0)
    text = {"model_type": "llama", **_TEXT}
    if family == "llava":
        vision = {"model_type": "clip_vision_model", **_TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 32}
        config = AutoConfig.for_model(
            "llava", text_config=text, vision_config=vision, image_token_index=PLACEHOLDER, image_token_id=PLACEHOLDER
        )
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif family == "smolvlm":
        vision = {**_TOWER, "image_size": 16, "patch_size": 4}
        config = AutoConfig.for_model(
            "smolvlm",
            text_config=text,
            vision_config=vision,
            image_token_id=PLACEHOLDER,
            scale_factor=2,
            pad_token_id=0,
        )
        model = SmolVLMForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif family == "gemma3":
        # What the last layer shows to an image's tokens moves no logits.
        types = ["full_attention", "sliding_attention", "full_attention"]
        layers = {"layer_types": types, "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
        text = {**_TEXT, **layers, "model_type": "gemma3_text"}
        vision = {"model_type": "siglip_vision_model", **_TOWER, "image_size": 16, "patch_size": 4}
        config = AutoConfig.for_model(
            "gemma3", text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, mm_tokens_per_image=16
        )
        model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif family == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text = {**_TEXT, "num_hidden_layers": 3, "model_type": "qwen3_vl_text", "rope_parameters": rope}
        vision = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "depth": 3,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 32,
        }
        # A table of 5 by 5 positions for 4 by 6 patches, and two layers that see more than the embedding.
        vision.update(num_position_embeddings=25, deepstack_visual_indexes=[0, 1])
        config = AutoConfig.for_model(
            "qwen3_vl",
            text_config=text,
            vision_config=vision,
            image_token_id=PLACEHOLDER,
            video_token_id=PLACEHOLDER - 1,
        )
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif family in ("qwen2_5_vl", "qwen2_vl"):
        rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
        text = {**_TEXT, "model_type": f"{family}_text", "rope_parameters": rope}
        vision = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
        if family == "qwen2_5_vl":
            vision.update(
                hidden_size=32, intermediate_size=64, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
            )
        else:
            vision.update(embed_dim=32, hidden_size=32)
        config = AutoConfig.for_model(
            family, text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, video_token_id=PLACEHOLDER - 1
        )
        kind = Qwen2_5_VLForConditionalGeneration if family == "qwen2_5_vl" else Qwen2VLForConditionalGeneration
        model = kind._from_config(config, attn_implementation="eager")
    else:
        audio = {**_TOWER, "num_mel_bins": 8, "max_source_positions": 6, "vocab_size": VOCAB}
        config = AutoConfig.for_model("voxtral", text_config=text, audio_config=audio, audio_token_id=PLACEHOLDER)
        model = VoxtralForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def prompt(
    model: PreTrainedModel, items: int, length: int, per_item: int, seed: int = 0, start: int = 2, apart: int = 0
) -> dict[str, torch.Tensor]:
    """What a processor would give: `items` images or pieces of sound amid `length` tokens of text.

    Args:
        start: Tokens of text before the first.
        apart: Tokens of text between one and the next.
    """
    generator = torch.Generator().manual_seed(seed)
    text = tokens(length, seed=seed).clamp(max=PLACEHOLDER - 2)
    places = torch.full((1, per_item), PLACEHOLDER)
    cuts = [0, *(start + index * apart for index in range(items)), length]
    parts = [text[:, begin:end] for begin, end in zip(cuts, cuts[1:])]
    ids = torch.cat([tensor for part in parts[:-1] for tensor in (part, places)] + parts[-1:], dim=1)
    if model.config.model_type == "gemma3":
        pixels = torch.randn(items, 3, 16, 16, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == PLACEHOLDER).to(torch.int64)}
    if model.config.model_type in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl"):
        pixels = torch.randn(items * 24, 96, generator=generator)
        kinds, grids = (ids == PLACEHOLDER).to(torch.int64), torch.tensor([[1, 4, 6]] * items)
        return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    if model.config.model_type == "llava":
        return {"input_ids": ids, "pixel_values": torch.randn(items, 3, 16, 16, generator=generator)}
    if model.config.model_type == "smolvlm":
        return {"input_ids": ids, "pixel_values": torch.randn(1, items, 3, 16, 16, generator=generator)}
    return {"input_ids": ids, "input_features": torch.randn(items, 8, 12, generator=generator)}


@torch.no_grad()
def reference_logits(model: PreTrainedModel, inputs: dict[str, torch.Tensor], following: torch.Tensor) -> torch.Tensor:
    """Logits of the whole model after the prompt and after each later token: [1, following.shape[1] + 1, vocab]."""
    implementations = {
        name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")
    }
    model.set_attn_implementation("eager")
    if hasattr(model.model, "rope_deltas"):
        # Those of an earlier prompt would count.
        model.model.rope_deltas = None
    try:
        cache = DynamicCache(config=model.config.get_text_config())
        rows = [model(**inputs, past_key_values=cache).logits[:, -1]]
        for position in range(following.shape[1]):
            rows.append(model(input_ids=following[:, position : position + 1], past_key_values=cache).logits[:, -1])
    finally:
        model.set_attn_implementation(implementations[""])
    return torch.stack(rows, dim=1)
