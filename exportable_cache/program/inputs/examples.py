"""One picture or sound as an encoder takes it, where the model's config says its shape."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
KINDS = (IMAGE, VIDEO, AUDIO)
#: Arguments of models that hold pixels or samples, of each kind.
MAIN_INPUTS = {
    IMAGE: ("pixel_values", "pixel_values_images", "image_pixel_values", "flattened_patches", "image_patches"),
    VIDEO: ("pixel_values_videos",),
    AUDIO: ("input_features", "input_values", "audio_input_features", "audio_input_ids"),
}
_GRID = "image_grid_thw"
#: Frames, rows and columns of patches of each video.
VIDEO_GRID = "video_grid_thw"


def example_of(
    model: PreTrainedModel, kind: str, image_size: int | Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """What a processor would give for one item of zeros, by name of the argument.

    Args:
        kind: One of `KINDS`.
        image_size: Height and width of every image in pixels, or one number for both, where the config leaves it open.

    Raises:
        InputError: If the model takes no such items, or `image_size` does not fit.
        UnsupportedModelError: If the config does not say the shape of an item.
    """
    config, names = model.config, inspect.signature(model.forward).parameters
    if not any(name in names for name in MAIN_INPUTS[kind]):
        raise InputError(
            f"{config.model_type!r} takes no {kind}; leave it out of modalities, or pass the whole model where this is "
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
    vision, audio = getattr(config, "vision_config", None), getattr(config, "audio_config", None)
    side = getattr(vision, "image_size", None)
    if kind == IMAGE and "pixel_values" in names and side is not None:
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if image_size is not None:
            raise InputError(
                f"image_size is {image_size!r}, but {config.model_type!r} takes images of {height} x {width} pixels; "
                "leave it out"
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
        f"the config of {config.model_type!r} does not say what its {kind} encoder takes; pass what its "
        f"processor gives for one item: modalities={{{kind!r}: {{...}}}}"
    )


def checked_example(
    model: PreTrainedModel, kind: str, given: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of an item that differ from one to the next, which are floats, and those that go with every one.

    Args:
        given: By name, as a processor gives it; what is about text is left out.

    Raises:
        InputError: If there is no tensor of floats, or the model does not take one of them.
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
            f"{type(model).__name__} takes no {unknown[0]!r}, which the example of {kind} has; leave it out"
        )
    main = [name for each in MAIN_INPUTS.values() for name in each]
    # A rate of frames is a float, too, and goes with every film.
    floats = {
        name: value.to(model.dtype)
        for name, value in tensors.items()
        if value.is_floating_point() and (name in main or "pixel_values" in name)
    }
    if not floats:
        raise InputError(
            f"the example of {kind} has no pixels or samples; pass what the processor gives (return_tensors='pt')"
        )
    return floats, {name: value for name, value in tensors.items() if name not in floats}


def grid_for(config: PreTrainedConfig, image_size: int | Sequence[int] | None) -> tuple[int, int, int]:
    """The grid (time, height, width) in patches of an image of `image_size`: `(1, 32, 32)` for 448 at patches of 14.

    Args:
        image_size: Height and width in pixels, or one number for both.

    Raises:
        InputError: If it is missing, or not a multiple of the pixels behind one embedding.
    """
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    what = f"a multiple of {unit}, the pixels behind one token of {config.model_type!r}"
    if image_size is None:
        raise InputError(
            f"{config.model_type!r} takes images of any size, a program those of one: pass image_size, height and "
            f"width in pixels, each {what}, such as image_size=({16 * unit}, {16 * unit})"
        )
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or any(
        not isinstance(side, int) or isinstance(side, bool) or side < 1 or side % unit for side in sides
    ):
        raise InputError(f"image_size is {image_size!r}; it must be height and width in pixels, each {what}")
    return 1, sides[0] // vision.patch_size, sides[1] // vision.patch_size


def patch_values(config: PreTrainedConfig) -> int:
    """Values of one patch in pixel_values [patches, values]."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    return int(channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2)


def placeholders_of(config: PreTrainedConfig, kind: str) -> list[int]:
    """Ids of tokens that may stand for one embedding in a prompt, the likeliest first.

    Raises:
        UnsupportedModelError: If the config names none.
    """
    names = [f"{kind}_token_id", f"{kind}_token_index", "media_placeholder_token_id", f"{kind}_patch_id"]
    # GLM-4V marks frames of videos as images between two tokens of their own.
    names += ["image_token_id"] if kind == VIDEO else []
    found = [getattr(config, name, None) for name in names]
    tokens = list(dict.fromkeys(token for token in found if isinstance(token, int)))
    if tokens:
        return tokens
    raise UnsupportedModelError(
        f"the config of {config.model_type!r} names no token that stands for {kind} in a prompt ({', '.join(names)}): "
        "its mechanism is another one; leave out modalities to run its text decoder"
    )
