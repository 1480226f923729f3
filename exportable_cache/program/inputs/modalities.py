"""Detection of the modalities that a model takes: images, video and audio."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...cache.attention.implementation import attention_of
from ...errors import InputError, UnsupportedModelError
from ...models.layers.specs import item_slots_of
from .cross_items import cross_modality
from .encoder_items import encoder_modality, takes_encoder_items
from .examples import example_of
from .kinds import IMAGE, check_kinds
from .modality import Modality, modality_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def modalities_of(
    model: PreTrainedModel,
    kinds: Sequence[str] | Mapping[str, Mapping[str, Any] | None],
    image_size: int | Sequence[int] | None = None,
) -> tuple[Modality, ...]:
    """Find how a model takes the given kinds of input, by running it up to its decoder on random items.

    Args:
        model: The model.
        kinds: Any of `image`, `video` and `audio`; or a mapping from kind to the processor's output for one item, which
            determines its size. Without one the size comes from the config.
        image_size: Height and width of every image in pixels, or one number for both, if the config does not fix it
            (Qwen2-VL).

    Returns:
        One `Modality` per kind, in order.

    Raises:
        InputError: If a kind is unknown, or the model does not take it.
        UnsupportedModelError: If the model processes it in an unknown way.
    """
    check_kinds(kinds)
    if image_size is not None and IMAGE not in kinds:
        raise InputError(
            f"image_size is only used for images, got {image_size!r}; pass modalities=['image'] too, or leave it out"
        )
    found: list[Modality] = []
    crosses = item_slots_of(model.config) > 0
    for kind in kinds:
        given = kinds[kind] if isinstance(kinds, Mapping) else None
        if crosses and image_size is None:
            with attention_of(model, "eager"):
                found.append(cross_modality(model, kind, given))
            continue
        if takes_encoder_items(model):
            found.append(encoder_modality(model, kind, given, image_size))
            continue
        if given is not None:
            found.append(modality_of(model, kind, given))
            continue
        example = example_of(model, kind, image_size)
        try:
            found.append(modality_of(model, kind, example))
        except UnsupportedModelError:
            # Models that split images into tiles take them per prompt, [batch, images, ...].
            if "pixel_attention_mask" not in inspect.signature(model.forward).parameters:
                raise
            found.append(modality_of(model, kind, {name: value[None] for name, value in example.items()}))
    return tuple(found)
