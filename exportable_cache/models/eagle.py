"""EAGLE-3 draft heads: one decoder layer over fused hidden states of three layers of its target (Li et al. 2025)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ..errors import InputError, UnsupportedModelError, first_line

_FILE = "model.safetensors"
#: Sizes in the config of a head.
_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
#: All fields that are read. Others, such as the attention implementation, could load code from the hub.
_FIELDS = (
    *(*_SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "draft_vocab_size", "eagle_config"),
)


class EagleLayer(nn.Module):
    """The decoder layer of a head, whose queries, keys and values see an embedding and a hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, old.out_features, old.bias is not None))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Return the next hidden states, [1, length, hidden_size], from those before and the tokens' embeddings."""
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, **attention)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleModel(LlamaPreTrainedModel):
    """An EAGLE-3 head with the interface of transformers' `MtpModel`, as far as a `DraftHead` uses it.

    Attributes:
        sources: Indices of the target's layers whose inputs are fused.
    """

    d2t: torch.Tensor

    def __init__(self, config: LlamaConfig, target: PreTrainedModel) -> None:
        super().__init__(config)
        count, size = target.config.get_text_config().num_hidden_layers, config.hidden_size
        given = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        self.sources = tuple(given or (2, count // 2, count - 3))
        self.fc = nn.Linear(len(self.sources) * size, size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.lm_head = nn.Linear(size, drafted, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.post_init()

    def forward_layer(
        self, index: int, hidden: torch.Tensor, position_ids: torch.Tensor, cache: Any, inputs_embeds: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer, see `EagleLayer`."""
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            past_key_values=cache,
            position_ids=position_ids,
            layer_idx=index,
        )
        rotation = self.rotary(inputs_embeds, position_ids=position_ids)
        return self.layers[index](
            inputs_embeds, hidden, position_embeddings=rotation, attention_mask=mask, past_key_values=cache
        )

    def logits(self, hidden: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return logits of the target's vocabulary; tokens that the head does not know get the lowest value."""
        known = self.lm_head(self.norm(hidden))
        tokens = torch.arange(known.shape[-1], device=known.device) + self.d2t
        logits = known.new_full((*known.shape[:-1], vocab_size), torch.finfo(known.dtype).min)
        return logits.index_copy(-1, tokens, known)


def read_config(folder: Path) -> LlamaConfig:
    """Return the config of a head, which is checked without its weights.

    Raises:
        InputError: If the folder has no such head.
        UnsupportedModelError: If it is a head of another kind, such as Medusa.
    """
    try:
        fields = json.loads((folder / "config.json").read_text())
        names = " ".join(map(str, fields.get("architectures") or ()))
        is_eagle = "eagle3" in names.lower()
        if "medusa" in f"{names} {' '.join(map(str, fields))}".lower() or not is_eagle:
            raise UnsupportedModelError(
                f"draft must be 'mtp' or the folder of an EAGLE-3 head, got {str(folder)!r} with architectures "
                f"{names or 'none'!s}; Medusa, EAGLE-1 and EAGLE-2 heads are not supported"
            )
        if fields.get("num_hidden_layers", 1) != 1:
            raise InputError(
                f"num_hidden_layers of an EAGLE-3 head must be 1, got {str(fields['num_hidden_layers'])[:40]} in "
                f"{str(folder)!r}; heads of several layers are not supported"
            )
        known = {name: fields[name] for name in _FIELDS if name in fields}
        config = LlamaConfig.from_dict({**known, "num_hidden_layers": 1}, attn_implementation="sdpa")
        for name in (*_SIZES, *(("draft_vocab_size",) if known.get("draft_vocab_size") is not None else ())):
            size = getattr(config, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {str(size)[:40]!r}")
        return config
    except (InputError, UnsupportedModelError):
        raise
    except Exception as error:  # the file may be anything
        raise InputError(
            f"draft must be 'mtp' or the folder of an EAGLE-3 head (config.json, {_FILE}), got {str(folder)!r}: "
            f"{first_line(error)}; check the folder"
        ) from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a head's file.

    Raises:
        InputError: If there is no such file, or it is damaged.
    """
    file, pickled = folder / _FILE, folder / "pytorch_model.bin"
    if not file.is_file():
        if pickled.is_file():
            raise InputError(
                f"{pickled} is a pickle, which can run code; save the head with safetensors "
                f"(safetensors.torch.save_file) as {_FILE}"
            )
        raise InputError(f"the folder of a draft head must have {_FILE}, got {str(folder)!r} without it; download it")
    try:
        return load_file(file)
    except Exception as error:  # the file may be anything
        raise InputError(
            f"{file} must be a whole safetensors file, got {file.stat().st_size:,} bytes ({first_line(error)}); "
            "download the head again"
        ) from error


def load_eagle(model: PreTrainedModel, folder: Path) -> EagleModel:
    """Load a head from a folder with `config.json` and `model.safetensors`.

    Raises:
        InputError: If the folder has no such head, or it was trained for a target of other sizes.
        UnsupportedModelError: If it is a head of another kind, such as Medusa.
    """
    config, target = read_config(folder), model.config.get_text_config()
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise UnsupportedModelError(
            f"draft must be left out for {type(model).__name__}: an EAGLE-3 head takes hidden states of a decoder with "
            "layers, such as that of Llama or Qwen 3; decode without it"
        )
    for name in ("hidden_size", "vocab_size"):
        if getattr(config, name) != getattr(target, name):
            raise InputError(
                f"the {name} of the draft head must be that of the model, {getattr(target, name)}, got "
                f"{getattr(config, name)}; use a head that was trained for {type(model).__name__} of this size"
            )
    renamed = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): weight
        for name, weight in _read_weights(folder).items()
        if not name.endswith(("t2d", "embed_tokens.weight"))
    }
    drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
    if "d2t" not in renamed:
        if drafted != target.vocab_size:
            raise InputError(
                f"{folder / _FILE} must have d2t, which maps the {drafted} tokens of the head to the "
                f"{target.vocab_size} of the model, got {len(renamed)} other tensors; download the head again"
            )
        # A head of the whole vocabulary needs no map.
        renamed["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    try:
        # On no device, because the sizes in the config may be anything until they are compared with the tensors.
        with torch.device("meta"):
            head = EagleModel(config, model)
        if not all(type(index) is int and 0 <= index < target.num_hidden_layers for index in head.sources):
            raise ValueError(f"layers {head.sources} are fused")
        dtypes = {name: torch.int64 if name == "d2t" else model.dtype for name in renamed}
        head.load_state_dict(
            {name: weight.to(dtypes[name], copy=True) for name, weight in renamed.items()}, strict=True, assign=True
        )
        head.rotary = LlamaRotaryEmbedding(config)
        tokens = torch.arange(len(head.d2t)) + head.d2t
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < target.vocab_size:
            raise ValueError(f"d2t maps to tokens {int(tokens.min())} to {int(tokens.max())} of {target.vocab_size}")
        with torch.no_grad():  # settings such as those of RoPE fail in a step only
            state = torch.zeros(1, 1, config.hidden_size, dtype=model.dtype)
            head.forward_layer(0, state, torch.zeros(1, 1, dtype=torch.int64), None, inputs_embeds=state)
    except Exception as error:
        raise InputError(
            f"the tensors of {folder / _FILE} must be those of its config and fit the model, got: "
            f"{' '.join(str(error).split())[:300]}; download the head again"
        ) from error
    return head
