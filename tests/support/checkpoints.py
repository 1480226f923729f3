"""Checkpoints as hubs hold them, tiny and random, written by the packages that write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from .models import tiny_model

#: Rows that blocks and groups of 32 divide.
WIDE = {"hidden_size": 64, "head_dim": 16}
GROUP = 32


def wide_model(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    return tiny_model(family, **{**WIDE, **overrides})


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def write_compressed_tensors(folder: Path, kind: str) -> PreTrainedModel:
    """`int4` in groups of 32 packed, `int8` or `fp8` by rows; returns the model before."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    bits, form, largest = {
        "int4": (4, "pack-quantized", 7),
        "int8": (8, "int-quantized", 127),
        "fp8": (8, "float-quantized", 448),
    }[kind]
    groups = {"strategy": "group", "group_size": GROUP} if bits == 4 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type="float" if kind == "fp8" else "int", symmetric=True, **groups)
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights, format=form)},
        ignore=["lm_head"],
        quantization_status="frozen",
        format=form,
    )
    model = wide_model()
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            weight = module.weight.data.unflatten(1, (-1, GROUP)) if bits == 4 else module.weight.data[:, None]
            module.weight_scale.data = weight.abs().amax(-1) / largest
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return wide_model()


def write_torchao(folder: Path, bits: int) -> PreTrainedModel:
    """Weights alone in 8 bits by rows, or in 4 by groups of 32; returns the model before."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    rule = Int8WeightOnlyConfig(version=2) if bits == 8 else IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP))
    return _quantised_by_transformers(folder, TorchAoConfig(rule))


def write_bitsandbytes(folder: Path, bits: int) -> PreTrainedModel:
    """NF4 or 8 bits; returns the model before."""
    from transformers import BitsAndBytesConfig

    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
    return _quantised_by_transformers(folder, BitsAndBytesConfig(**options))


def _quantised_by_transformers(folder: Path, config: Any) -> PreTrainedModel:
    model = wide_model()
    model.save_pretrained(folder / "float")
    quantised = AutoModelForCausalLM.from_pretrained(folder / "float", quantization_config=config, dtype=torch.float32)
    quantised.save_pretrained(folder)
    return model


def write_fp8(folder: Path) -> PreTrainedModel:
    """8-bit floats with a scale per block of 32 by 32, as DeepSeek's are; returns the model before."""
    model = wide_model()
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            scales = tensor.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP)).abs().amax((1, 3)) / 448
            tensors[f"{name}_scale_inv"] = scales
            spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
            tensors[name] = (tensor / spread).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
    edit_config(folder, quantization_config=quantization)
    return model


def write_mxfp4(folder: Path) -> PreTrainedModel:
    """Experts in 4-bit floats, as gpt-oss has them; returns the model that they stand for."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    generator = torch.Generator().manual_seed(0)
    model = wide_model("gpt_oss", max_position_embeddings=131072)
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        codes = torch.randint(16, (experts, columns, rows // GROUP, GROUP), generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, columns, rows // GROUP), 127 - 4, dtype=torch.uint8)
        model.get_parameter(name).data = (values[codes] / 16).flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def write_gguf(path: Path, end_of_turn: int | None = None, control: Mapping[int, str] | None = None) -> PreTrainedModel:
    """Write a Llama with a tokenizer, its linear layers in Q8_0, and return the model before.

    Args:
        end_of_turn: Named beside the end of text, which is token 2.
        control: Texts of further control tokens, by id.
    """
    import gguf

    model = tiny_model("llama")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters = ["▁", *map(chr, range(ord("a"), ord("z") + 1))]
    words = ["<unk>", "<s>", "</s>", *letters, *(f"x{index}" for index in range(config.vocab_size - 3 - len(letters)))]
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([0.0] * len(words))
    kinds = [2, 3, 3, *[1] * (len(words) - 3)]
    for token, text in (control or {}).items():
        words[token], kinds[token] = text, 3
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    writer.add_unk_token_id(0)
    for name, tensor in model.state_dict().items():
        values = _as_gguf(name, tensor, config).contiguous().numpy().astype(np.float32)
        if "proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_gguf(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of queries and keys in llama.cpp's order: pairs that rotate together lie side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{parts[part]}.weight"
