"""Tiny random models that read images or sound, prompts for them, and their own answers."""

from __future__ import annotations

import torch
from transformers import (
    AutoConfig,
    DynamicCache,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SmolVLMForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from .models import VOCAB, tokens

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
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_multimodal(family: str) -> PreTrainedModel:
    """A random Llava or SmolVLM with 4 embeddings per image, or a Voxtral with 3 per piece of sound."""
    torch.manual_seed(0)
    text = {"model_type": "llama", **_TEXT}
    if family == "llava":
        vision = {"model_type": "clip_vision_model", **_TOWER, "image_size": 16, "patch_size": 8, "projection_dim": 32}
        config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=PLACEHOLDER, image_token_id=PLACEHOLDER)
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    elif family == "smolvlm":
        vision = {**_TOWER, "image_size": 16, "patch_size": 4}
        config = AutoConfig.for_model(
            "smolvlm", text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, scale_factor=2, pad_token_id=0
        )
        model = SmolVLMForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        audio = {**_TOWER, "num_mel_bins": 8, "max_source_positions": 6, "vocab_size": VOCAB}
        config = AutoConfig.for_model("voxtral", text_config=text, audio_config=audio, audio_token_id=PLACEHOLDER)
        model = VoxtralForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def prompt(model: PreTrainedModel, items: int, length: int, per_item: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a processor would give: `items` images or pieces of sound amid `length` tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    text = tokens(length, seed=seed).clamp(max=PLACEHOLDER - 1)
    places = torch.full((1, items * per_item), PLACEHOLDER)
    ids = torch.cat([text[:, :2], places, text[:, 2:]], dim=1)
    if model.config.model_type == "llava":
        return {"input_ids": ids, "pixel_values": torch.randn(items, 3, 16, 16, generator=generator)}
    if model.config.model_type == "smolvlm":
        return {"input_ids": ids, "pixel_values": torch.randn(1, items, 3, 16, 16, generator=generator)}
    return {"input_ids": ids, "input_features": torch.randn(items, 8, 12, generator=generator)}


@torch.no_grad()
def reference_logits(model: PreTrainedModel, inputs: dict[str, torch.Tensor], following: torch.Tensor) -> torch.Tensor:
    """Logits of the whole model after the prompt and after each later token: [1, following.shape[1] + 1, vocab]."""
    implementations = {name: module.config._attn_implementation for name, module in model.named_modules() if hasattr(module, "config")}
    model.set_attn_implementation("eager")
    try:
        cache = DynamicCache(config=model.config.get_text_config())
        rows = [model(**inputs, past_key_values=cache).logits[:, -1]]
        for position in range(following.shape[1]):
            rows.append(model(input_ids=following[:, position : position + 1], past_key_values=cache).logits[:, -1])
    finally:
        model.set_attn_implementation(implementations[""])
    return torch.stack(rows, dim=1)
