"""Layers of cross-attention to pictures, between a decoder's layers of self-attention (Llama 3.2 Vision)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def cross_layers_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Which layers of a text decoder attend to pictures; they keep nothing of a token of text."""
    return tuple(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def tiles_of(config: PreTrainedConfig) -> int:
    """Parts of one picture that tokens see or do not, of a model that has `cross_layers_of`; 0 without pictures."""
    return getattr(getattr(config, "vision_config", None), "max_num_tiles", 0) if cross_layers_of(config) else 0


def item_slots_of(config: PreTrainedConfig) -> int:
    """Positions of one picture in the layers of `cross_layers_of`: of each tile its patches and one more, as
    `MllamaForConditionalGeneration._prepare_static_cache` counts them. 0 without pictures.
    """
    tiles = tiles_of(config)
    if not tiles:
        return 0
    vision = config.vision_config
    return int(tiles * ((vision.image_size // vision.patch_size) ** 2 + 1))


def check_in_one_place(config: PreTrainedConfig, *elsewhere: Any) -> None:
    """Refuse a model with `cross_layers_of` whose layers live in several processes, or not on the device.

    Args:
        elsewhere: What says so, None or False each where it does not.

    Raises:
        UnsupportedModelError: If one does.
    """
    if cross_layers_of(config) and any(elsewhere):
        raise UnsupportedModelError(
            f"{config.model_type!r} reads the keys of its layers of cross-attention as they are, so they live in one "
            "process and on its device; leave out offload, split_context and the split of the model"
        )


def probe_pictures(model: PreTrainedModel) -> dict[str, Any]:
    """What a model is given beside a token of text, so that layers of cross-attention write keys and values."""
    if not item_slots_of(model.config) or "cross_attention_states" not in inspect.signature(model.forward).parameters:
        return {}
    size = model.config.get_text_config(decoder=True).hidden_size
    return {"cross_attention_states": torch.zeros(1, 1, size, dtype=model.dtype, device=model.device)}
