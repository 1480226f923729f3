"""Published shapes of models, and checkpoints of them with random weights in bfloat16.

benchmarks/real_sizes.py and benchmarks/peers.py use them, because weights cannot be downloaded everywhere and their
values do not change what a step costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Bytes of a shard, as on the hub.
SHARD = 5_000_000_000
#: Positions of every checkpoint instead of the published number, so that no converter allocates more.
POSITIONS = 32768


@dataclass(frozen=True)
class Shape:
    """A model's shape.

    Attributes:
        source: Hub id of the config with these fields.
        fields: Fields of the config that matter for its cost.
        changed: What differs from the published config, or "".
    """

    source: str
    fields: dict[str, Any]
    changed: str = ""


_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6}
_LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 5e5}
_PLAIN_ROPE = "plain rotary frequencies instead of scaled ones, which costs the same"
SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": Shape(
        "Qwen/Qwen3-0.6B",
        {
            **_QWEN3,
            **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-1b": Shape(
        "google/gemma-3-1b-it",
        {
            "model_type": "gemma3_text",
            **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4},
            **{"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512},
            **{"query_pre_attn_scalar": 256, "tie_word_embeddings": True},
        },
    ),
    "llama-3.2-1b": Shape(
        "meta-llama/Llama-3.2-1B",
        {
            **_LLAMA3,
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
            "tie_word_embeddings": True,
        },
        _PLAIN_ROPE,
    ),
    "qwen3-4b": Shape(
        "Qwen/Qwen3-4B",
        {
            **_QWEN3,
            **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": Shape(
        "Qwen/Qwen3-30B-A3B",
        {
            **_QWEN3,
            **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 6},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
            **{"moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False},
        },
        "6 of 48 layers",
    ),
    "llama-3.1-8b": Shape(
        "meta-llama/Llama-3.1-8B",
        {
            **_LLAMA3,
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            "tie_word_embeddings": False,
        },
        _PLAIN_ROPE,
    ),
}


def _as_published(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return names and tensors as checkpoints have them: one tensor for each projection of each expert."""
    for key, tensor in state.items():
        layer, _, part = key.rpartition("experts.")
        if not layer or part not in ("gate_up_proj", "down_proj"):
            yield key, tensor
            continue
        for index, weight in enumerate(tensor):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for name, piece in zip(names, weight.chunk(len(names)), strict=True):
                yield f"{layer}experts.{index}.{name}.weight", piece


def write_checkpoint(name: str, folder: Path) -> None:
    """Write random weights in bfloat16, with the usual initial spread, unless the folder has them.

    Tensors are made one at a time, in shards as on the hub.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(SHAPES[name].fields)
    fields |= {"max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    # transformers saves some fields by newer names, which converters do not know.
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=1))
    generator = torch.Generator().manual_seed(0)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    shards: list[dict[str, Any]] = [{}]
    index, size = {}, 0
    for key, tensor in _as_published(model.state_dict()):
        if key in tied:
            continue
        if size + tensor.nbytes > SHARD:
            save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", {"format": "pt"})
            shards[-1].clear()
            shards.append({})
            size = 0
        is_norm = tensor.dim() == 1
        values = torch.empty(tensor.shape, dtype=torch.bfloat16)
        values.fill_(0.0 if "gemma" in name else 1.0) if is_norm else values.normal_(0.0, 0.02, generator=generator)
        shards[-1][key], index[key] = values, f"model-{len(shards):05}.safetensors"
        size += tensor.nbytes
    save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", {"format": "pt"})
    document = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
