"""EAGLE-3 heads for tiny models, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel

from exportable_cache.models.eagle import EagleModel

from .models import tiny_model

_SAME = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
#: The head of `sometimes_right_eagle` knows no token from here on.
KNOWN = 100


def eagle_folder(folder: Path, model: PreTrainedModel, **changed: Any) -> EagleModel:
    """Write a random head with 40 tokens of its own, and return it."""
    head, fields = _random_head(model, {"draft_vocab_size": 40, **changed})
    head.d2t.copy_(2 * torch.arange(40))
    save_eagle(folder, head, fields)
    return head


def save_eagle(folder: Path, head: EagleModel, fields: dict[str, Any]) -> None:
    """Write a head under the names of published ones."""
    folder.mkdir(exist_ok=True)
    weights = {
        name.replace("layers.0.", "midlayer."): tensor.contiguous() for name, tensor in head.state_dict().items()
    }
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[torch.arange(len(head.d2t)) + head.d2t] = True
    save_file({**weights, "t2d": known}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))


def _random_head(model: PreTrainedModel, changed: dict[str, Any]) -> tuple[EagleModel, dict[str, Any]]:
    fields = {
        **{name: getattr(model.config, name) for name in _SAME},
        **{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **changed},
    }
    torch.manual_seed(1)
    head = EagleModel(LlamaConfig.from_dict(fields), model).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            values = 0.3 * torch.randn_like(parameter)
            parameter.copy_(values if parameter.dim() > 1 else 1 + values / 3)
    return head, fields


@torch.no_grad()
def sometimes_right_eagle(folder: Path, family: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Return a model of three layers whose next token depends on the last one only, and write a head for it.

    The head computes the same with a little noise, and proposes tokens below `KNOWN` only. Its attention looks at the
    newest token by a constant query and key, whose rotations agree best at distance 0.
    """
    model = tiny_model(family, num_hidden_layers=3, **overrides)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1)
    changed = {
        "num_key_value_heads": model.config.num_attention_heads,
        "attention_bias": True,
        "draft_vocab_size": KNOWN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    head, fields = _random_head(model, changed)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.zero_()
    attention, size = head.layers[0].self_attn, model.config.hidden_size
    for one in (attention.q_proj, attention.k_proj):
        one.bias.fill_(8.0)
    # Ten times the embedding replaces the state before, whose norm is ten times its direction.
    attention.v_proj.weight.copy_(10 * torch.cat([torch.eye(size), -torch.eye(size)], dim=1))
    attention.o_proj.weight.copy_(torch.eye(size))
    head.lm_head.weight.copy_(model.lm_head.weight[:KNOWN])
    torch.manual_seed(3)
    head.lm_head.weight.add_(0.01 * torch.randn_like(head.lm_head.weight))
    save_eagle(folder, head, fields)
    return model
