"""Images that are attended to by cross-attention layers inside the decoder (Llama 3.2 Vision).

An encoder turns an image into states, and the cross-attention layers cache keys and values of these. The first step of
a prompt with images takes the states of all cached images. Every step takes a mask of the tiles that each token sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache.layers import CacheLayer, ItemsLayer
from ...cache.policies import ItemsPolicy, NoPolicy
from ...common.tensors import TensorSpec, name_forward
from ...errors import InputError, UnsupportedModelError
from ...models.layers.specs import item_slots_of, tiles_of
from ...models.patches.registry import patch_model
from ..methods import CROSS_MASK, ITEM_STATES, ITEMS_SEEN, ItemFacts, ProgramMethod
from .examples import checked_example, placeholders_of
from .front import handed_to_decoder
from .kinds import IMAGE
from .known_values import KnownValues
from .modality import Modality, joined_items, not_understood
from .probe import alike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...models.cache_factory import ExportableCache


@dataclass(frozen=True)
class CrossModality(Modality):
    """Images for cross-attention, each with one placeholder token in a prompt.

    Attributes:
        slots: Slots of one image in a cross-attention layer.
    """

    slots: int = 0

    @property
    def method(self) -> ProgramMethod:
        """The method `encode_image`, from one image to states [slots, hidden_size]."""
        states = TensorSpec(f"{self.kind}_states", self.dtype, (self.slots, self.hidden_size))
        return ProgramMethod(f"encode_{self.kind}", 1, 1, inputs=self.inputs, outputs=(states,), item=self.facts)

    def module(self, model: PreTrainedModel) -> nn.Module:
        """Return the module that runs `method`."""
        return ItemStatesModule(model, self)


class ItemStatesModule(nn.Module):
    """Module of a `CrossModality`: the encoder and the projector."""

    def __init__(self, model: PreTrainedModel, modality: CrossModality) -> None:
        super().__init__()
        # The whole model, because programs that are packaged together share weights by name.
        self.model = model
        name_forward(self, tuple(spec.name for spec in modality.inputs))

    def call(self, **item: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the states [slots, hidden_size] of one image."""
        return (_states(self.model, item),)


def cross_methods(
    methods: Mapping[str, ProgramMethod], modality: CrossModality, cache: ExportableCache
) -> dict[str, ProgramMethod]:
    """Return the text methods with the input `ITEMS_SEEN`, `encode_image`, and a `prefill_items` for each prefill.

    Args:
        methods: Methods of the text decoder.
        modality: The images.
        cache: The cache with cross-attention layers.
    """
    policy = next(layer.policy for layer in cache.layers if isinstance(layer.policy, ItemsPolicy))
    size = ("batch", policy.items * policy.item_slots, modality.hidden_size)
    states = TensorSpec(ITEM_STATES, modality.dtype, size)
    found = {}
    for name, method in methods.items():
        seen = TensorSpec(
            ITEMS_SEEN, "int64", ("batch", policy.items * modality.facts.tiles, method.inputs[0].shape[1])
        )
        found[name] = replace(method, inputs=(*method.inputs, seen))
    prefills = {name: one for name, one in found.items() if name.startswith("prefill")}
    if not prefills:
        longest = max((one for one in found.values() if not one.only_scores), key=lambda one: one.max_length)
        prefills = {"prefill": longest}
    for name, method in prefills.items():
        name = name.replace("prefill", "prefill_items")
        found[name] = replace(method, name=name, min_length=1, inputs=(*method.inputs, states), scored_tokens=0)
    return {**found, modality.method.name: modality.method}


def without_items(cache: ExportableCache) -> ExportableCache:
    """Return the cache without layers for images, for a program that skips their cross-attention."""
    if not any(isinstance(layer, ItemsLayer) for layer in cache.layers):
        return cache
    return type(cache)([CacheLayer(NoPolicy()) if isinstance(layer, ItemsLayer) else layer for layer in cache.layers])


def cross_modality(model: PreTrainedModel, kind: str, given: Mapping[str, Any] | None) -> CrossModality:
    """Find the image inputs of a model with cross-attention layers by running its encoder on random images.

    Args:
        model: The model, with eager attention.
        kind: Must be `image`.
        given: Output of its processor for one image; if None, it is made from the config.

    Raises:
        InputError: If `kind` is not `image`.
        UnsupportedModelError: If the model processes images in an unknown way.
    """
    if kind != IMAGE:
        raise InputError(f"{model.config.model_type!r} takes no {kind}; leave it out of modalities")
    patch_model(model)
    given = _example(model) if given is None else {name: one for name, one in given.items() if name != CROSS_MASK}
    floats, counted = checked_example(model, kind, given)
    generator = torch.Generator().manual_seed(0)
    items = [
        {**{name: torch.randn(one.shape, generator=generator).to(one) for name, one in floats.items()}, **counted}
        for _ in range(2)
    ]
    pair = joined_items(items, 1)
    known = KnownValues()
    try:
        with known.recording():
            states = [_states(model, item) for item in items]
    except Exception as error:  # any model's code runs here
        raise not_understood(model, kind, error) from error
    slots, tiles = item_slots_of(model.config), tiles_of(model.config)
    refuse = f"{model.config.model_type!r} processes {kind} in a way that is not supported: "
    if known.found or pair is None or states[0].shape[0] != slots:
        raise UnsupportedModelError(
            f"{refuse}an image has states {list(states[0].shape)} for {slots} slots; leave out modalities"
        )
    if not alike(_states(model, pair).float(), torch.cat(states).float(), model.dtype):
        raise UnsupportedModelError(f"{refuse}the states of one image depend on another; leave out modalities")
    _check_masks(model, tiles, slots, refuse)
    name = str(model.dtype).removeprefix("torch.")
    dtypes = {key: str(one.dtype).removeprefix("torch.") for key, one in counted.items()} | dict.fromkeys(floats, name)
    # Integers are inputs too, because the encoder only uses them as table indices.
    inputs = tuple(TensorSpec(key, dtypes[key], tuple(one.shape)) for key, one in (*floats.items(), *counted.items()))
    facts = ItemFacts(placeholders_of(model.config, kind)[0], tiles=tiles)
    return CrossModality(kind, inputs, 1, states[0].shape[1], name, facts, slots=slots)


def _states(model: PreTrainedModel, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
    size = model.config.get_text_config(decoder=True).hidden_size
    embeds = torch.zeros(1, 1, size, dtype=model.dtype, device=model.device)
    return handed_to_decoder(model, inputs_embeds=embeds, **item)["cross_attention_states"].flatten(0, -2)


def _example(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    vision, tiles = model.config.vision_config, tiles_of(model.config)
    names = inspect.signature(model.forward).parameters
    side = vision.image_size
    given = {
        "pixel_values": torch.zeros(1, 1, tiles, vision.num_channels, side, side, dtype=model.dtype),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.int64),
    }
    return {name: one.to(model.device) for name, one in given.items() if name in names}


def _check_masks(model: PreTrainedModel, tiles: int, slots: int, refuse: str) -> None:
    """Check that `ITEMS_SEEN` gives the same masks as the model computes from the processor's mask."""
    seen = torch.zeros(1, 3, 2, tiles, dtype=torch.int64, device=model.device)
    seen[0, 1, 0], seen[0, 2, 1, 0] = 1, 1
    flat = seen.flatten(2)
    size = model.config.get_text_config(decoder=True).hidden_size
    embeds = torch.zeros(1, 3, size, dtype=model.dtype, device=model.device)
    # The first token comes before any image.
    ours = torch.where(flat.any(dim=-1, keepdim=True), flat, -1)
    handed = [handed_to_decoder(model, inputs_embeds=embeds, cross_attention_mask=one) for one in (seen, ours)]
    masks = [one["cross_attention_mask"] for one in handed]
    rows = [one["full_text_row_masked_out_mask"] for one in handed]
    if not torch.equal(masks[0], masks[1][..., : 2 * slots]) or not torch.equal(*rows):
        raise UnsupportedModelError(f"{refuse}its mask follows an unknown rule; leave out modalities")
