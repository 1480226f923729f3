"""A tiny model has every kind of layer that the model of its default config has: no row shows what a tiny one lacks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from .architectures import Architecture, architectures
from .build import made
from .overrides import OVERRIDES
from .shrink import tiny_config

#: By what they lost once: experts, layers without positions, blocks of layers, attention in a tower, cross-attention.
ALWAYS = "flint switch_transformers nllb-moe llama4_text smollm3 inkling2_text lfm3_vl mllama".split()
#: Their default configs make no model, which is why the rules set fields of theirs.
WITHOUT_A_DEFAULT = (
    "image-aya_vision image-chameleon image-cohere_compass causal-cohere_compass_text causal-dbrx image-deepseek_ocr2 "
    "causal-dots1 image-emu3 image-fast_vlm image-granite4_vision causal-hunyuan_v1_dense causal-hunyuan_v1_moe "
    "image-hunyuan_vl causal-lfm2_moe causal-ministral speech-moonshine_streaming causal-nemotron image-qwen4_exp "
    "causal-qwen4_exp_text"
).split()
#: Facts of modules that say nothing of a kind: rates, ids, and names and numbers of layers.
_NO_KINDS = re.compile(r"dropout|layerdrop|pad(ding)?_(idx|index)|layer_idx|cache_key|image_seq_len|^p$|^training$")
#: What a tiny model does otherwise on purpose.
OTHERWISE = {
    "Identity": "a projection of BLT's, as wide as what it projects in the default config alone",
    "BltGlobalTransformer.token_embedding_projection: Identity": "the same",
    "DeepseekV2TopkRouter.top_k: None": "the default states no number of experts",
    "Exaone4_5_VisionAttention.num_key_value_groups: number": "the default has no whole number of groups",
    "PixtralMLP.act_fn: SiLUActivation": "Pixtral's own default, where another config sets it",
    "SiglipVisionModel.use_head: False": "the same",
    "XLMModel.causal: False": "the default is a masked language model",
}

ROWS = [
    pytest.param(row, id=row.name, marks=[pytest.mark.full] * (row.model_type not in ALWAYS))
    for row in architectures()
    if row.name not in WITHOUT_A_DEFAULT
]


def kinds_of(model: nn.Module) -> set[str]:
    """What tells layers of a model apart: classes of modules, which modules are within which, and flags."""
    found = set()
    for module in model.modules():
        name = type(module).__name__
        found.add(name)
        for field, value in vars(module).items():
            if field.startswith("_") or _NO_KINDS.search(field):
                continue
            if value is None or isinstance(value, (bool, str)):
                found.add(f"{name}.{field}: {value}")
            elif isinstance(value, (int, float)):
                found.add(f"{name}.{field}: {'number' if value else 'zero'}")
        found.update(
            f"{name}.{child}: {type(inner).__name__}"
            for child, inner in module.named_children()
            if not re.search(r"\d$", child)
        )
    return found


def without_weights(row: Architecture, config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return made(row, config)


@pytest.mark.parametrize("row", ROWS)
def test_a_tiny_model_has_every_kind_of_layer(row: Architecture) -> None:
    config_class = row.model_class.config_class
    default = config_class(**OVERRIDES.get(config_class.model_type, {}).get("_base", {}))
    lost = kinds_of(without_weights(row, default)) - kinds_of(without_weights(row, tiny_config(config_class)))
    assert not lost - OTHERWISE.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", WITHOUT_A_DEFAULT)
def test_what_is_left_out_has_no_default_model(name: str) -> None:
    row = next(row for row in architectures() if row.name == name)
    with pytest.raises(Exception):  # noqa: B017 - each fails in its own way
        without_weights(row, row.model_class.config_class())
