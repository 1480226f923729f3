"""Vision encoders sized by values of `image_grid_thw` (Qwen2-VL): for one grid, what depends on those values is
constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Model types whose encoder takes patches [patches, values] and a grid, and whose positions have three axes.
BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class SegmentEnds:
    """Cumulative lengths of what attends within itself, `SegmentEnds([0, 16, 32])`, as Python ints.

    It stands for the tensor `cu_seqlens`, of which the encoder takes differences, whose values it then asks for: a
    tracer has no values of tensors.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)

    def __getitem__(self, index: slice) -> SegmentEnds:
        return SegmentEnds(self.values[index])

    def __sub__(self, other: SegmentEnds) -> SegmentEnds:
        return SegmentEnds([mine - theirs for mine, theirs in zip(self.values, other.values)])

    def tolist(self) -> list[int]:
        return list(self.values)


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
    channels = getattr(vision, "in_channels", 3)
    return channels * vision.temporal_patch_size * vision.patch_size**2


def grid_constants(model: PreTrainedModel, grid: tuple[int, int, int]) -> dict[str, Any]:
    """What a vision encoder would compute from the values of `grid`, by the argument that takes it ready.

    The functions are transformers' own (vision_utils.py, 5.23), so are the arguments.
    """
    from transformers import vision_utils

    vision = model.config.vision_config
    grids = torch.tensor([grid])
    constants: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grids, vision.spatial_merge_size).to(model.device),
        "cu_seqlens": SegmentEnds(vision_utils.get_vision_cu_seqlens(grids).tolist()),
    }
    if hasattr(vision, "window_size"):
        index, ends = vision_utils.get_vision_window_index(
            grids, vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        constants["window_index"] = index.to(model.device)
        constants["cu_window_seqlens"] = SegmentEnds(ends.tolist())
    if hasattr(vision, "num_position_embeddings"):
        encoder = model.model.visual
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids,
            encoder.num_grid_per_side,
            mode=encoder.interpolation_mode,
            align_corners=encoder.interpolation_align_corners,
            spatial_merge_size=vision.spatial_merge_size,
        )
        constants["interp_indices"], constants["interp_weights"] = indices.to(model.device), weights.to(model.device)
    return constants
