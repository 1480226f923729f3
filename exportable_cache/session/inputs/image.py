"""Where the items of a prompt lie, and what its steps take for that: positions of several axes, items that stay whole.

Every kind of item counts, so this comes behind the stages of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...errors import InputError
from ...program.inputs.multimodal import IMAGE_IDS
from ...program.methods import POSITIONS
from .image_places import Pattern, grid_pattern, image_ids, placed_images, rope_positions, runs, whole_chunks
from .items import placeholders

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..program_stepper import ProgramStepper
    from ..token_rows import TokenRows
    from .items import ItemStage
    from .stage import Prompt, Steps


class ItemPlaces:
    """What the steps of a prompt with items take beside embeddings.

    Args:
        stages: Of the items.
        methods: Of the program.
        device: Where inputs are expected.
    """

    def __init__(
        self, stages: tuple[ItemStage, ...], methods: Mapping[str, ProgramMethod], device: torch.device
    ) -> None:
        steps = [each for each in methods.values() if each.is_step]
        further = {spec.name: spec for step in steps for spec in step.inputs}
        self.stages = stages
        self.device = device
        self.longest_step = max((step.max_length for step in steps if not step.takes_ids), default=0)
        self.stays_whole = IMAGE_IDS.name in further
        self.has_axes = POSITIONS in further
        self.sees_prompt = any(one.method.item is not None and one.method.item.sees == "prompt" for one in stages)
        axes = int(further[POSITIONS].shape[0]) if self.has_axes else 0
        self.patterns = [_pattern(stage, axes) for stage in stages]
        # Bundles from before say by an input of their steps alone that items are seen.
        seen = [stage.method.item is None or stage.method.item.sees for stage in stages]
        self.seen = torch.tensor([index for index, sees in enumerate(seen) if sees])

    def check(self, rows: TokenRows) -> None:
        """Refuse prompts whose items cannot go through whole.

        Raises:
            InputError: If an item is longer than a step, or rows differ where that is not possible.
        """
        if self.has_axes:
            self._check_contiguous(rows)
        if not self.stays_whole or not self._is_seen(rows).any():
            return
        if not rows.are_even:
            raise InputError(
                f"the rows hold {list(rows.lengths)} tokens, and items whose tokens see each other go through in one "
                "step: pass rows of equal length"
            )
        whole_chunks(self._ids(rows), self.longest_step)

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """The steps with what this program has to know of items; embeddings of any kind go with it."""
        if steps.are_ids or not (self.has_axes or self.stays_whole):
            return steps
        rows = prompt.rows
        further, sizes, placed = {}, None, None
        if self.stays_whole:
            ids = self._ids(rows)
            sizes = whole_chunks(ids, self.longest_step)
            further[IMAGE_IDS.name] = ids.to(self.device)
            placed = placed_images(image_ids(self._kinds(rows) >= 0))
        if self.has_axes:
            state = stepper.state
            first = state.length + state.images.deltas(state.length)
            positions, placed = rope_positions(self._kinds(rows), rows.lengths, first, self.patterns)
            further[POSITIONS] = positions.to(self.device)
        return replace(steps, sizes=sizes, further=further, placed=placed)

    def _check_contiguous(self, rows: TokenRows) -> None:
        for index, (stage, pattern) in enumerate(zip(self.stages, self.patterns)):
            for row in (self._kinds(rows) == index).tolist():
                for start, end in runs(row):
                    if (end - start) % pattern.tokens:
                        raise InputError(
                            f"{end - start} tokens of id {stage.token} follow each other, {stage.method.name} gives "
                            f"{pattern.tokens} embeddings of one item, whose positions belong together: build the "
                            "prompt with the model's own processor"
                        )

    def _kinds(self, rows: TokenRows) -> torch.Tensor:
        """Which stage's item each token is of, -1 on text: int64 [batch, length] on the host."""
        kinds = torch.full(rows.ids.shape, -1, dtype=torch.int64)
        for index, stage in enumerate(self.stages):
            kinds[placeholders(rows, stage.token).cpu()] = index
        return kinds

    def _is_seen(self, rows: TokenRows) -> torch.Tensor:
        return torch.isin(self._kinds(rows), self.seen)

    def _ids(self, rows: TokenRows) -> torch.Tensor:
        seen = self._is_seen(rows)
        return torch.zeros_like(rows.ids) if self.sees_prompt and seen.any() else image_ids(seen)


def _pattern(stage: ItemStage, axes: int) -> Pattern:
    """Positions of an item of a stage, on `axes` axes."""
    tokens, item, grid = stage.tokens_per_item, stage.method.item, stage.method.grid
    if item is not None and item.positions:
        return Pattern(torch.tensor(item.positions), item.advance)
    if item is None and grid is not None:
        time, height, width = grid
        merged = math.isqrt(time * height * width // tokens)
        return grid_pattern(height // merged, width // merged)
    return Pattern(torch.arange(tokens).expand(max(axes, 1), tokens), tokens)
