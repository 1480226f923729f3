"""Tiny random encoder-decoders, inputs for their encoders, and their own logits without a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

from .models import VOCAB

_BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 256,
    "init_std": 0.125,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_T5_FAMILY = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
_SPEECH = ("whisper", "moonshine")

#: Config fields by model type, past those of BART's or T5's family.
FAMILIES: dict[str, dict[str, Any]] = {
    "whisper": {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 128},
    "marian": {"decoder_vocab_size": VOCAB},
    # Several blocks of the encoder's attention.
    "longt5": {"local_radius": 3},
    "pegasus_x": {"block_size": 4},
    "switch_transformers": {"num_experts": 4},
    "moonshine": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "encoder_num_key_value_heads": 4,
        "decoder_num_key_value_heads": 4,
        "pad_token_id": 0,
    },
    "prophetnet": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
}


def tiny_seq2seq(family: str, **overrides: Any) -> PreTrainedModel:
    """A random model of a family with two encoder and three decoder layers, every parameter off its initial value."""
    torch.manual_seed(0)
    common = _T5 if family in _T5_FAMILY else {} if family in ("moonshine", "prophetnet") else _BART
    config = AutoConfig.for_model(family, **{**common, **FAMILIES.get(family, {}), **overrides})
    auto = AutoModelForSpeechSeq2Seq if family in _SPEECH else AutoModelForSeq2SeqLM
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def encoder_inputs(model: PreTrainedModel, length: int, batch_size: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the model's tokenizer or processor would give: ids and mask, log-mel features, or samples."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_ids":
        ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(batch_size, length, generator=generator)}
    return {"input_features": torch.randn(batch_size, model.config.num_mel_bins, length, generator=generator)}


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], ids: torch.Tensor, prompt: int
) -> torch.Tensor:
    """Return the logits after the decoder's prompt and after each later token, computed without a cache.

    Args:
        model: The model.
        inputs: The encoder's inputs.
        ids: int64 [batch, length], the decoder's, of which the first `prompt` columns are the prompt.
        prompt: Tokens of the decoder's prompt.

    Returns:
        [batch, ids.shape[1] - prompt + 1, vocab].
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        mask = {name: tensor for name, tensor in inputs.items() if name == "attention_mask"}
        encoded = model.get_encoder()(**inputs)
        logits = model(decoder_input_ids=ids, encoder_outputs=encoded, use_cache=False, **mask).logits
    finally:
        model.set_attn_implementation(implementation)
    return logits[:, prompt - 1 :]
