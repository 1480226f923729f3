"""Images in a prompt, some of which go through whole, or have positions of three axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...program.inputs.multimodal import IMAGE_IDS, POSITIONS
from .image_places import image_ids, placed_images, rope_positions, whole_chunks
from .items import ItemStage

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..program_stepper import ProgramStepper
    from .stage import Prompt, Steps

_MASK = "pixel_attention_mask"
_GRID = "image_grid_thw"


class ImageStage(ItemStage):
    """Images, the last stage of a prompt: where they lie decides what all of its steps take.

    Args:
        method: The encoder, `encode_image`.
        token: Id of its placeholder.
        device: Where inputs are expected.
        methods: Of the program.
    """

    def __init__(
        self, method: ProgramMethod, token: int, device: torch.device, methods: Mapping[str, ProgramMethod]
    ) -> None:
        super().__init__(method, token, device)
        steps = [each for each in methods.values() if each.is_step]
        further = {name for step in steps for name in step.input_names}
        self.longest_step = max((step.max_length for step in steps if not step.takes_ids), default=0)
        self.stays_whole = IMAGE_IDS.name in further
        self.has_axes = POSITIONS.name in further
        self.names += (_MASK, _GRID) if self.has_axes else (_MASK,)

    def check(self, ids: torch.Tensor, given: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """See `ItemStage.check`; an image longer than a step, and one of another grid or with padding, is refused as
        well.
        """
        if _MASK in given and not bool(given[_MASK].all()):
            raise InputError(f"{_MASK} has padding; pass images of the exported size")
        if _GRID in given:
            self._check_grid(given[_GRID])
        items = super().check(ids, given)
        if self.stays_whole:
            whole_chunks(image_ids(ids == self.token), self.longest_step)
        return items

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """See `ItemStage.extend`; embeddings of any kind go with what this program has to know of images."""
        steps = super().extend(steps, prompt, stepper)
        if steps.are_ids:
            return steps
        is_image = prompt.rows.ids == self.token
        if self.has_axes:
            state = stepper.state
            first = state.length + state.images.deltas(state.length)
            positions, placed = rope_positions(is_image, first, self._size())
            return replace(steps, further={POSITIONS.name: positions.to(self.device)}, placed=placed)
        if self.stays_whole:
            ids = image_ids(is_image)
            sizes = whole_chunks(ids, self.longest_step)
            further = {IMAGE_IDS.name: ids.to(self.device)}
            return replace(steps, sizes=sizes, further=further, placed=placed_images(ids))
        return steps

    def _size(self) -> tuple[int, int]:
        """Rows and columns of an image's tokens: a square of patches goes into each."""
        time, height, width = self.method.grid
        merged = math.isqrt(time * height * width // self.tokens_per_item)
        return height // merged, width // merged

    def _check_grid(self, tensor: Any) -> None:
        grids = tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor
        other = next((given for given in grids if tuple(given) != self.method.grid), None)
        if other is not None:
            raise InputError(
                f"{_GRID} has {list(other)}, {self.method.name} was made for {list(self.method.grid)} patches (time, "
                "height, width): resize images to that size before the processor, or make the session, or export, "
                "with another image_size"
            )
