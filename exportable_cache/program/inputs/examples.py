"""Example inputs of encoders for images, video and audio, from the shapes in a model's config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError, UnsupportedModelError
from .kinds import AUDIO, IMAGE, VIDEO, image_sides

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Names of model arguments with pixels or samples, by kind.
MAIN_INPUTS = {
    IMAGE: ("pixel_values", "pixel_values_images", "image_pixel_values", "flattened_patches", "image_patches"),
    VIDEO: ("pixel_values_videos",),
    AUDIO: ("input_features", "input_values", "audio_input_features", "audio_input_ids"),
}
_GRID = "image_grid_thw"
#: Entry of an example of audio that no model takes: its samples before the processor, to which sessions pad others.
SAMPLES = "samples"
#: Arguments with indices into the patches of all items of a prompt, int64 [embeddings, pooled], -1 for none (Molmo 2).
PATCH_INDICES = ("image_token_pooling", "video_token_pooling")
#: Argument with the frames, rows and columns of patches of each video.
VIDEO_GRID = "video_grid_thw"


def example_of(
    model: PreTrainedModel, kind: str, image_size: int | Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """Return the inputs a processor would make for one item, filled with zeros, by argument name.

    Args:
        model: The model.
        kind: One of `KINDS`.
        image_size: Height and width of every image in pixels, or one number for both, if the config does not fix it.

    Raises:
        InputError: If the model takes no such items, or `image_size` does not fit.
        UnsupportedModelError: If the config does not give the shape of an item.
    """
    config, names = model.config, inspect.signature(model.forward).parameters
    if not any(name in names for name in MAIN_INPUTS[kind]):
        raise InputError(
            f"{config.model_type!r} takes no {kind}; leave it out of modalities, or pass the whole model if this is "
            "its text decoder"
        )
    zeros = functools.partial(torch.zeros, dtype=model.dtype, device=model.device)
    if kind == IMAGE and _GRID in names and hasattr(config, "vision_config"):
        vision = config.vision_config
        if hasattr(vision, "patch_size") and hasattr(vision, "spatial_merge_size"):
            grid = grid_for(config, image_size)
            patches = grid[0] * grid[1] * grid[2]
            return {
                "pixel_values": zeros(patches, patch_values(config)),
                _GRID: torch.tensor([grid], device=model.device),
            }
    # T5Gemma 2 has it in the config of its encoder.
    vision = getattr(config, "vision_config", getattr(getattr(config, "encoder", None), "vision_config", None))
    audio = getattr(config, "audio_config", None)
    side = getattr(vision, "image_size", None)
    if kind == IMAGE and "pixel_values" in names and side is not None:
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if image_size is not None:
            raise InputError(
                f"image_size must be {height} x {width} pixels for {config.model_type!r}, got {image_size!r}; leave it "
                "out"
            )
        return {"pixel_values": zeros(1, getattr(vision, "num_channels", 3), height, width)}
    frames, bins = getattr(audio, "max_source_positions", None), getattr(audio, "num_mel_bins", None)
    if kind == AUDIO and "input_features" in names and frames is not None and bins is not None:
        given = {"input_features": zeros(1, bins, 2 * frames)}
        for name in ("input_features_mask", "feature_attention_mask"):
            if name in names:
                given[name] = torch.ones(1, 2 * frames, dtype=torch.int64, device=model.device)
        return given
    raise UnsupportedModelError(
        f"the config of {config.model_type!r} does not give the input shape of its {kind} encoder; pass the output of "
        f"its processor for one item: modalities={{{kind!r}: {{...}}}}"
    )


def checked_example(
    model: PreTrainedModel, kind: str, given: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split an example into the encoder's inputs and the tensors equal for every item, leaving out those about text.

    The encoder's inputs are pixels or samples, and the tokens of an instruction that the encoder reads (InstructBLIP).

    Args:
        model: The model.
        kind: One of `KINDS`.
        given: Output of a processor, by name.

    Raises:
        InputError: If there are no pixels or samples, or the model does not take one of the tensors.
    """
    names = inspect.signature(model.forward).parameters
    tensors = {
        name: value.to(model.device)
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
        and name not in ("input_ids", "attention_mask")
        and "token_type_ids" not in name
    }
    unknown = [name for name in tensors if name not in names]
    if unknown:
        raise InputError(
            f"the example of {kind} has {unknown[0]!r}, which {type(model).__name__} does not take; leave it out"
        )
    main = [name for each in MAIN_INPUTS.values() for name in each]
    # Selected by name, because a frame rate is a float too but is equal for every video.
    floats = {
        name: value.to(model.dtype)
        for name, value in tensors.items()
        if value.is_floating_point() and (name in main or "pixel_values" in name)
    }
    if not floats:
        raise InputError(
            f"the example of {kind} has no pixels or samples; pass the processor's output (return_tensors='pt')"
        )
    read = [name for name in tensors if name.endswith("_input_ids")]
    read += [name.replace("input_ids", "attention_mask") for name in read]
    inputs = {**floats, **{name: value for name, value in tensors.items() if name in read}}
    return inputs, {name: value for name, value in tensors.items() if name not in inputs}


def grid_for(config: PreTrainedConfig, image_size: int | Sequence[int] | None) -> tuple[int, int, int]:
    """Return the grid (time, height, width) of an image, in patches: `(1, 32, 32)` for 448 pixels and patches of 14.

    Args:
        config: The model's config.
        image_size: Height and width in pixels, or one number for both.

    Raises:
        InputError: If it is missing, or not a multiple of the pixels that one embedding covers.
    """
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    what = f"a multiple of {unit}, the pixels that one token of {config.model_type!r} covers"
    if image_size is None:
        raise InputError(
            f"image_size must be given for {config.model_type!r}, because a program takes images of one size: pass "
            f"height and width in pixels, each {what}, such as image_size=({16 * unit}, {16 * unit}) (--image-size "
            f"{16 * unit}x{16 * unit})"
        )
    sides = image_sides(image_size)
    if any(side % unit for side in sides):
        raise InputError(f"image_size must be height and width in pixels, each {what}, got {image_size!r}")
    return 1, sides[0] // vision.patch_size, sides[1] // vision.patch_size


def patch_values(config: PreTrainedConfig) -> int:
    """Return the number of values of one patch in pixel_values [patches, values]."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    return int(channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)


def placeholders_of(config: PreTrainedConfig, kind: str) -> list[int]:
    """Return candidates for the placeholder token of one embedding, most likely first.

    Raises:
        UnsupportedModelError: If the config has none.
    """
    names = [f"{kind}_token_id", f"{kind}_token_index", "media_placeholder_token_id", f"{kind}_patch_id"]
    # GLM-4V uses the image token for frames of videos.
    names += ["image_token_id"] if kind == VIDEO else []
    # Phi-4 names it in the config of the encoder.
    owners = (config, getattr(config, "audio_config" if kind == AUDIO else "vision_config", None))
    found = [getattr(owner, name, None) for owner in owners for name in names]
    tokens = list(dict.fromkeys(token for token in found if isinstance(token, int)))
    if tokens:
        return tokens
    raise UnsupportedModelError(
        f"the config of {config.model_type!r} has no placeholder token for {kind} ({', '.join(names)}), so its "
        "mechanism is not supported; leave out modalities to run its text decoder"
    )


def shifted_indices(indices: torch.Tensor, count: int, patches: int) -> torch.Tensor:
    """Return `PATCH_INDICES` of one item, repeated for `count` items of `patches` patches each."""
    return torch.cat([torch.where(indices < 0, indices, indices + item * patches) for item in range(count)])
