"""Detection of how a model takes images, video and audio, and the two kinds that are not among a decoder's text.

In Llama 3.2 Vision, cross-attention layers inside the decoder attend to images. An encoder turns an image into states,
and these layers cache keys and values of them. The first step of a prompt with images takes the states of all cached
images. Every step takes a mask of the tiles that each token sees.

In Florence-2, items are among the text of an encoder-decoder's encoder: embeddings that replace placeholders.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...cache.attention.implementation import attention_of
from ...cache.layers import CacheLayer, ItemsLayer
from ...cache.policies import ItemsPolicy, NoPolicy
from ...common.tensors import TensorSpec, name_forward
from ...errors import InputError, UnsupportedModelError
from ...models.layers.encoder import run_encoder
from ...models.layers.specs import item_slots_of, tiles_of
from ...models.patches.registry import patch_model
from ...models.quantized_rows import ExactActivations, rounds_inputs
from ..methods import CROSS_MASK, ITEM_STATES, ITEMS_SEEN, ItemFacts, ProgramMethod
from .examples import SAMPLES, checked_example, example_of, placeholders_of
from .front import handed_to_decoder
from .kinds import IMAGE, check_kinds, image_sides
from .known_values import KnownValues
from .modality import Modality, joined_items, modality_of, not_understood
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


#: Token of the prompts that the probe runs; any id that is not the placeholder would do.
_TEXT = 3


@dataclass(frozen=True)
class EncoderModality(Modality):
    """Images, video or audio that the method `encode` takes next to its tokens, one item per row."""

    @property
    def batched_inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs of `encode`, with one item per row."""
        return tuple(TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape[1:])) for spec in self.inputs)

    def embedded(
        self, model: PreTrainedModel, input_ids: torch.Tensor, items: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the embeddings [batch, length, hidden_size] of token ids and of the items at their placeholders."""
        with self.known.handed_out() if torch.compiler.is_exporting() else nullcontext():
            features = _features(model, self.kind, items)
        return _placed(model, input_ids, features, self.token_id)


def takes_encoder_items(model: PreTrainedModel) -> bool:
    """Return True if the encoder of an encoder-decoder takes text, so that items are among its tokens."""
    return bool(model.config.is_encoder_decoder) and model.main_input_name == "input_ids"


def encoder_modality(
    model: PreTrainedModel,
    kind: str,
    given: Mapping[str, Any] | None,
    image_size: int | Sequence[int] | None = None,
) -> EncoderModality:
    """Find the items of an encoder by running it on two random ones, and compare with the whole model.

    Args:
        model: The encoder-decoder, whose encoder takes text.
        kind: `image`, `video` or `audio`.
        given: Output of its processor for one item; if None, it is made from the config.
        image_size: See `example_of`.

    Raises:
        InputError: If the example has several items, or the model takes no such item.
        UnsupportedModelError: If the model does not replace placeholders by the embeddings of `get_*_features`.
    """
    inputs, fixed = checked_example(model, kind, example_of(model, kind, image_size) if given is None else given)
    many = next((value.shape[0] for value in inputs.values() if value.shape[0] != 1), 1)
    if many != 1:
        raise InputError(
            f"the example of {kind} must have one item, because encode takes one per row, got {many}; pass one"
        )
    fixed |= {name: value for name, value in inputs.items() if not value.is_floating_point()}
    if fixed or not hasattr(model, f"get_{kind}_features"):
        what = f"reads {sorted(fixed)[0]}" if fixed else f"has no get_{kind}_features"
        raise UnsupportedModelError(
            f"{model.config.model_type!r} {what}, which is not supported for the encoder of an encoder-decoder; leave "
            "out modalities to run it on text"
        )
    token_id = placeholders_of(model.config, kind)[0]
    generator = torch.Generator().manual_seed(0)
    known = (KnownValues(), KnownValues())
    with attention_of(model, "eager"):
        try:
            for values in known:
                item = {name: torch.randn(value.shape, generator=generator).to(value) for name, value in inputs.items()}
                with values.recording():
                    features = _features(model, kind, item)
                _check_encoder(model, kind, features, token_id, item)
            known[0].check_same(known[1], model.config.model_type)
        except Exception as error:  # any model's code runs here
            raise not_understood(model, kind, error) from error
    return EncoderModality(
        kind,
        tuple(TensorSpec.of(name, value) for name, value in inputs.items()),
        features.shape[1],
        features.shape[2],
        str(features.dtype).removeprefix("torch."),
        ItemFacts(token_id, tokens=features.shape[1]),
        known=known[1],
    )


def _features(model: PreTrainedModel, kind: str, items: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the embeddings [batch, tokens, hidden_size] of one item per row."""
    found = getattr(model, f"get_{kind}_features")(**items)
    features = getattr(found, "pooler_output", found)
    if not isinstance(features, torch.Tensor) or features.dim() != 3:
        raise UnsupportedModelError(
            f"get_{kind}_features of {model.config.model_type!r} must return [items, tokens, hidden_size], got another "
            "result; leave out modalities to run it on text"
        )
    return features


def _placed(model: PreTrainedModel, input_ids: torch.Tensor, features: torch.Tensor, token_id: int) -> torch.Tensor:
    embeds = model.get_input_embeddings()(input_ids)
    is_item = input_ids == token_id
    # Row by row, because a scatter over the batch would move the items of all rows after one without placeholders.
    index = (is_item.cumsum(-1) - 1).clamp(0, features.shape[1] - 1)
    found = features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))
    return torch.where(is_item[..., None], found.to(embeds.dtype), embeds)


def _check_encoder(
    model: PreTrainedModel, kind: str, features: torch.Tensor, token_id: int, item: Mapping[str, torch.Tensor]
) -> None:
    """Check that the encoder computes the same states from our embeddings as in the whole model."""
    text = torch.full((1, 2), _TEXT if token_id != _TEXT else _TEXT + 1, device=model.device)
    placeholders = torch.full((1, features.shape[1]), token_id, device=model.device)
    ids = torch.cat([text, placeholders, text], dim=1)
    mask = torch.ones_like(ids)
    whole = model(input_ids=ids, attention_mask=mask, decoder_input_ids=text, use_cache=False, **item)
    expected = whole.encoder_last_hidden_state
    hidden, _ = run_encoder(model, mask, inputs_embeds=_placed(model, ids, features, token_id))
    if expected is None or not alike(hidden[0], expected[0], hidden.dtype):
        raise UnsupportedModelError(
            f"the encoder of {model.config.model_type!r} processes {kind} in a way that is not supported: its states "
            "do not follow from embeddings at placeholders; leave out modalities to run it on text"
        )


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
            (Qwen2-VL). With an example, the size of its image, which is recorded.

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
    # Without rounded activations, whose last bits depend on what else a call computes.
    with ExactActivations() if rounds_inputs(model) else nullcontext():
        return tuple(_found(model, kinds, image_size))


def _found(
    model: PreTrainedModel,
    kinds: Sequence[str] | Mapping[str, Mapping[str, Any] | None],
    image_size: int | Sequence[int] | None,
) -> Iterator[Modality]:
    crosses = item_slots_of(model.config) > 0
    found: Modality
    for kind in kinds:
        given = kinds[kind] if isinstance(kinds, Mapping) else None
        if crosses and image_size is None:
            with attention_of(model, "eager"):
                found = cross_modality(model, kind, given)
        elif takes_encoder_items(model):
            found = encoder_modality(model, kind, given, image_size)
        elif given is not None:
            found = modality_of(model, kind, given)
        else:
            example = example_of(model, kind, image_size)
            try:
                found = modality_of(model, kind, example)
            except UnsupportedModelError:
                # Models that split images into tiles take them per prompt, [batch, images, ...].
                if "pixel_attention_mask" not in inspect.signature(model.forward).parameters:
                    raise
                found = modality_of(model, kind, {name: value[None] for name, value in example.items()})
        yield _of_size(found, given, image_size)


def _of_size(modality: Modality, given: Mapping[str, Any] | None, image_size: int | Sequence[int] | None) -> Modality:
    """Record the size of the image or audio that an example was made of."""
    if given is not None and SAMPLES in given:
        return replace(modality, facts=replace(modality.facts, samples=given[SAMPLES]))
    if given is None or image_size is None or modality.kind != IMAGE:
        return modality
    return replace(modality, facts=replace(modality.facts, size=image_sides(image_size)))
