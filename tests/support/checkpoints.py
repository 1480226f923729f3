"""Checkpoints as hubs hold them, tiny and random, written by the packages that write them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
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


def write_torchao(folder: Path, scheme: str | int) -> PreTrainedModel:
    """Write a checkpoint of torchao, and return the model before.

    Args:
        scheme: 8 for weights alone by rows, 4 for groups of 32, "8da4w" or "8da8w" with rounded activations,
            "asymmetric" for 4 bits with zero points, "mixed" for several schemes.
    """
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType
    from transformers import TorchAoConfig

    group = PerGroup(GROUP)
    rules: dict[str | int, Any] = {
        4: ao.IntxWeightOnlyConfig(torch.int4, group),
        8: ao.Int8WeightOnlyConfig(version=2),
        "8da4w": ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=group),
        "8da8w": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "asymmetric": ao.IntxWeightOnlyConfig(torch.int4, group, mapping_type=MappingType.ASYMMETRIC),
    }
    rules["mixed"] = ao.FqnToConfig({r"re:.*self_attn\..*": rules["asymmetric"], r"re:.*mlp\..*": rules[8]})
    return _quantised_by_transformers(folder, TorchAoConfig(rules[scheme]))


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


def write_gguf(
    path: Path,
    end_of_turn: int | None = None,
    control: Mapping[int, str] | None = None,
    kinds_of_weights: Sequence[str] = ("Q8_0",),
    kind_of_table: str | None = None,
    **sizes: int,
) -> PreTrainedModel:
    """Write a Llama with a tokenizer, its linear layers in some types of blocks, and return the model before.

    Args:
        end_of_turn: Named beside the end of text, which is token 2.
        control: Texts of further control tokens, by id.
        kinds_of_weights: Types of linear layers, one after the other; types that gguf does not quantise have random
            blocks.
        kind_of_table: Type of the embedding table; None for floats.
        **sizes: Fields of the config.
    """
    import gguf

    model = tiny_model("llama", **sizes)
    kinds_of_linears = itertools.cycle(kinds_of_weights)
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
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_gguf(name, tensor, config).contiguous().numpy().astype(np.float32)
        if "proj" in name or (kind_of_table is not None and "embed" in name):
            kind = gguf.GGMLQuantizationType[next(kinds_of_linears) if "proj" in name else kind_of_table]
            writer.add_tensor(_gguf_name(name), blocks(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


#: Offsets of the float16 scales in blocks of types that gguf does not quantise.
_SCALES_OF_BLOCKS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
                     "IQ4_XS": (0,), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
                     "IQ3_XXS": (0,), "IQ3_S": (0,), "Q1_0": ()}  # fmt: skip


def blocks(values: np.ndarray, kind: Any) -> np.ndarray:
    """Return the blocks of a matrix, or random ones with scales of a sensible size."""
    import gguf

    if kind.name not in _SCALES_OF_BLOCKS:
        return gguf.quants.quantize(values, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(len(values))
    made = random.integers(0, 256, (len(values), values.shape[1] // elements, size), dtype=np.uint8)
    if kind.name in ("Q4_K", "Q5_K"):
        # The first group of each block has a minimum and no scale.
        made[..., 4] &= 192
    if kind.name == "IQ1_M":
        # Its scale, 2^-7 here, is in the upper four bits of four words.
        words = made[..., 48:].view(np.uint16)
        words[...] = words & 0x0FFF | np.array([0, 0, 0, 2], dtype=np.uint16) << 12
    if not _SCALES_OF_BLOCKS[kind.name]:
        return made.reshape(len(values), -1)
    factors = random.uniform(0.5, 1, (len(_SCALES_OF_BLOCKS[kind.name]), *made.shape[:2]))
    for size_of_scale in (2**-10, None):
        if size_of_scale is None:
            size_of_scale = 2**-10 * 0.03 / float(gguf.quants.dequantize(made, kind).std())
        for offset, each in zip(_SCALES_OF_BLOCKS[kind.name], factors, strict=True):
            made[..., offset : offset + 2] = (each * size_of_scale).astype(np.float16)[..., None].view(np.uint8)
    return made.reshape(len(values), -1)


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


def linears_of(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a decoder, without its head."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings()
    }


Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a packed layer, and its weight in float32."""


def gptq_layer(
    shape: Sequence[int],
    generator: np.random.Generator,
    bits: int = 4,
    version: str = "gptq",
    sym: bool = True,
    group: int = GROUP,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Packed:
    """Pack random weights [outputs, inputs] as AutoGPTQ does, one number at a time.

    By the description in AutoGPTQ's `qlinear_cuda.py` and GPTQModel's `BaseQuantLinear`.
    """
    outputs, inputs = shape
    size = inputs if group < 0 else group
    groups = inputs // size
    numbers = generator.integers(0, 2**bits, (inputs, outputs))
    zeros = np.full((groups, outputs), 2 ** (bits - 1))
    if not sym:
        zeros = generator.integers(0, 2**bits, (groups, outputs))
    scales = torch.from_numpy(generator.uniform(0.01, 0.02, (groups, outputs))).to(dtype)
    index = np.arange(inputs) // size
    if act_order:
        generator.shuffle(index)
    plain = (numbers - zeros[index]) * scales.double().numpy()[index]
    stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
    tensors = {
        "qweight": _packed_down(numbers, bits),
        "qzeros": _packed_down(stored.T, bits).T,
        "scales": scales,
        "g_idx": torch.from_numpy(index).int(),
    }
    return tensors, torch.from_numpy(plain.T).float()


def gptq_fields(
    bits: int = 4, version: str = "gptq", sym: bool = True, group: int = GROUP, act_order: bool = False, **_: Any
) -> dict[str, Any]:
    """Return the quantization config of `gptq_layer`."""
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
    return {**fields, "checkpoint_format": version}


def write_gptq(folder: Path, model: PreTrainedModel | None = None, **form: Any) -> PreTrainedModel:
    """Write a GPTQ checkpoint of random weights, and return the model with these weights in float32."""
    return _write_packed(folder, model or wide_model(), partial(gptq_layer, **form), gptq_fields(**form))


def awq_layer(shape: Sequence[int], generator: np.random.Generator) -> Packed:
    """Pack random weights [outputs, inputs] as AutoAWQ's `gemm` does, one number at a time.

    By the description in AutoAWQ's `WQLinear_GEMM.from_linear`.
    """
    outputs, inputs = shape
    numbers = generator.integers(0, 16, (inputs, outputs))
    zeros = generator.integers(0, 16, (inputs // GROUP, outputs))
    scales = torch.from_numpy(generator.uniform(0.01, 0.02, zeros.shape)).half()
    index = np.arange(inputs) // GROUP
    plain = (numbers - zeros[index]) * scales.double().numpy()[index]
    tensors = {"qweight": _awq_words(numbers), "qzeros": _awq_words(zeros), "scales": scales}
    return tensors, torch.from_numpy(plain.T).float()


AWQ_FIELDS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def write_awq(folder: Path, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """Write an AWQ checkpoint of random weights, and return the model with these weights in float32."""
    return _write_packed(folder, model or wide_model(), awq_layer, AWQ_FIELDS)


def _awq_words(numbers: np.ndarray) -> torch.Tensor:
    rows, columns = numbers.shape
    packed = np.zeros((rows, columns // 8), dtype=np.uint32)
    for column in range(columns // 8):
        for place, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed[:, column] |= numbers[:, 8 * column + output].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32))


def _packed_down(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack columns of numbers into words of 32 bits, the first in the lowest bits."""
    packed = np.zeros((len(numbers) * bits // 32, numbers.shape[1]), dtype=np.uint32)
    for row, values in enumerate(numbers):
        packed[row * bits // 32] |= values.astype(np.uint32) << np.uint32(row * bits % 32)
    return torch.from_numpy(packed.view(np.int32))


def _write_packed(folder: Path, model: PreTrainedModel, pack: Any, fields: dict[str, Any]) -> PreTrainedModel:
    """Write a model whose linear layers are packed random weights, which also become its own."""
    generator, packed = np.random.default_rng(0), {}
    for name, layer in linears_of(model).items():
        tensors, layer.weight.data = pack(layer.weight.shape, generator)
        packed[name] = tensors
    model.save_pretrained(folder)
    replace_layers(folder, packed)
    edit_config(folder, quantization_config=fields)
    return model


def replace_layers(folder: Path, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Replace weights of a checkpoint by other tensors, given by the layers' names."""
    tensors = load_file(folder / "model.safetensors")
    for name, parts in layers.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


#: Kinds of compressed-tensors layers: format, and arguments of its weights.
COMPRESSED = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    "int4-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int3": ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": GROUP}),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}  # fmt: skip


def write_compressed(folder: Path, *kinds: str) -> PreTrainedModel:
    """Write a Llama whose layers are compressed by one or two kinds, and return the model that the package reads.

    With two kinds, the second is that of the MLPs.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    generator = torch.Generator().manual_seed(0)
    targets = (["Linear"],) if len(kinds) == 1 else (["re:.*self_attn.*"], ["re:.*mlp.*"])
    schemes = [
        QuantizationScheme(targets=target, weights=QuantizationArgs(**COMPRESSED[kind][1]), format=COMPRESSED[kind][0])
        for kind, target in zip(kinds, targets, strict=True)
    ]
    model = wide_model()

    def pack(name: str, weight: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        scheme = schemes[-1 if "mlp" in name else 0]
        arguments = scheme.weights
        grouped = weight.data.unflatten(1, (-1, arguments.group_size or weight.shape[1]))
        largest = grouped.abs().amax(-1)
        given = {"weight": weight.data, "weight_scale": largest / (2 ** (arguments.num_bits - 1) - 1)}
        if arguments.type == "float":
            given["weight_scale"] = largest / 448
            if arguments.strategy == "tensor":
                given["weight_scale"] = largest.amax().reshape(1) / 448
            if arguments.strategy == "tensor_group":
                whole = 448 * 6 / weight.data.abs().amax().reshape(1)
                given |= {
                    "weight_scale": (largest / 6 * whole).to(torch.float8_e4m3fn).float(),
                    "weight_global_scale": whole,
                }
        if not arguments.symmetric:
            zeros = torch.randint(-8, 8, largest.shape, generator=generator)
            given["weight_zero_point"] = zeros.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        packed = compressor.compress(given, scheme)
        weight.data = compressor.decompress(packed, scheme)["weight"].float()
        return packed

    packed = {name: pack(name, layer.weight) for name, layer in linears_of(model).items()}
    model.save_pretrained(folder)
    replace_layers(folder, packed)
    groups = {f"group_{index}": scheme.model_dump() for index, scheme in enumerate(schemes)}
    edit_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": groups,
            "format": "mixed-precision" if len(kinds) > 1 else schemes[0].format,
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        },
    )
    return model
