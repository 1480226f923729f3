"""Positions of images in a prompt, chunks that keep them whole, and the inputs that steps take for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...errors import InputError
from ...program.inputs.multimodal import IMAGE_IDS
from ...program.methods import POSITIONS

if TYPE_CHECKING:
    from ...program.methods import ProgramMethod
    from ..rows import TokenRows
    from ..stepper import ProgramStepper
    from .items import ItemStage
    from .stages import Prompt, Steps


@dataclass(frozen=True)
class Placed:
    """An image among the tokens of a row.

    Attributes:
        start: Position of its first token in the cache.
        end: Position after its last token.
        delta: Difference between rotary positions and positions in the cache after it, for models whose images have
            fewer positions than tokens; 0 otherwise.
    """

    start: int
    end: int
    delta: int = 0


@dataclass(frozen=True)
class PlacedImages:
    """Images in the rows of a session, oldest first: `PlacedImages(((Placed(2, 6, -2),), ()))` at batch size 2."""

    rows: tuple[tuple[Placed, ...], ...]

    @classmethod
    def none(cls, batch_size: int) -> PlacedImages:
        """Return the value for rows that hold text only."""
        return cls(((),) * batch_size)

    @classmethod
    def from_saved(cls, rows: list[list[list[int]]], lengths: Sequence[int]) -> PlacedImages:
        """Check the result of `to_lists` from a file, and return the images.

        Args:
            rows: Start, end and delta of each image in each row.
            lengths: Most tokens that each row ever held.

        Raises:
            ValueError: If it is malformed, or an image lies outside its row.
        """
        found = cls(tuple(tuple(Placed(*image) for image in row) for row in rows))
        if len(found.rows) != len(lengths):
            raise ValueError(f"images must have {len(lengths)} rows, got {len(found.rows)}")
        for row, length in zip(found.rows, lengths, strict=True):
            end = 0
            for image in row:
                numbers = (image.start, image.end, image.delta)
                if any(type(number) is not int or abs(number) >= 2**62 for number in numbers):
                    raise ValueError(f"an image must have three integers, got {numbers!r}")
                if not end <= image.start < image.end <= length:
                    raise ValueError(f"an image is at {image.start} to {image.end}, in a row of {length} tokens")
                end = image.end
        return found

    def to_lists(self) -> list[list[list[int]]]:
        """Return the images as JSON."""
        return [[[image.start, image.end, image.delta] for image in row] for row in self.rows]

    def deltas(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return what the next token's rotary position adds to its position in the cache, int64 [batch].

        Args:
            lengths: Number of tokens in each row, int64 [batch].
        """
        found = [
            next((image.delta for image in reversed(row) if image.end <= length), 0)
            for row, length in zip(self.rows, lengths.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.int64)

    def followed_by(self, other: PlacedImages) -> PlacedImages:
        """Return these images followed by those of later tokens."""
        return PlacedImages(tuple(before + after for before, after in zip(self.rows, other.rows, strict=True)))

    def begun(self, lengths: torch.Tensor) -> PlacedImages:
        """Return the images of which rows of `lengths` tokens, int64 [batch], hold at least the first token."""
        return PlacedImages(
            tuple(
                tuple(image for image in row if image.start < length)
                for row, length in zip(self.rows, lengths.tolist(), strict=True)
            )
        )

    def up_to(self, lengths: torch.Tensor) -> PlacedImages:
        """Return the images that remain when rows are cut to `lengths`, int64 [batch].

        Raises:
            InputError: If the cut goes through an image, because a part of an image is not a valid prompt.
        """
        for row, length in zip(self.rows, lengths.tolist(), strict=True):
            for image in row:
                if image.start < length < image.end:
                    raise InputError(
                        f"cannot rewind to {length} tokens, which is inside the image at {image.start} to "
                        f"{image.end - 1}; take back all of it, or none"
                    )
        return PlacedImages(
            tuple(
                tuple(image for image in row if image.end <= length)
                for row, length in zip(self.rows, lengths.tolist(), strict=True)
            )
        )


def runs(is_image: list[bool]) -> list[tuple[int, int]]:
    """Return start and end of each run of image tokens: `runs([False, True, True])` is `[(1, 3)]`."""
    found, start = [], None
    for index, value in enumerate([*is_image, False]):
        if value and start is None:
            start = index
        elif not value and start is not None:
            found.append((start, index))
            start = None
    return found


def image_ids(is_image: torch.Tensor) -> torch.Tensor:
    """Return the index of each token's run of image tokens, -1 on text, int64 [batch, length]."""
    ids = torch.full(is_image.shape, -1, dtype=torch.int64)
    for row, values in enumerate(is_image.tolist()):
        for number, (start, end) in enumerate(runs(values)):
            ids[row, start:end] = number
    return ids


def placed_images(ids: torch.Tensor) -> PlacedImages:
    """Return the images of a prompt, with positions counted from its first token.

    Args:
        ids: Result of `image_ids`.
    """
    return PlacedImages(
        tuple(tuple(Placed(start, end) for start, end in runs([i >= 0 for i in row])) for row in ids.tolist())
    )


def whole_chunks(ids: torch.Tensor, longest: int) -> list[int]:
    """Return the sizes of the chunks of a prompt, none of which ends inside an image of any row.

    Args:
        ids: Result of `image_ids`.
        longest: Most tokens in a chunk.

    Raises:
        InputError: If an image is longer.
    """
    inside = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(dim=0).tolist()
    length, start, sizes = ids.shape[1], 0, []
    while start < length:
        end = min(start + longest, length)
        while start < end < length and inside[end - 1]:
            end -= 1
        if end == start:
            block = next((stop - start for stop in range(start + 1, length) if not inside[stop - 1]), length - start)
            raise InputError(
                f"the image at token {start} of the prompt has {block} tokens, which must be fed in one step because "
                f"they attend to each other, and a step takes at most {longest}; make the session, or export, with "
                f"prefill_chunk={block} or more"
            )
        sizes.append(end - start)
        start = end
    return sizes


@dataclass(frozen=True)
class Pattern:
    """Rotary positions of an item.

    Attributes:
        positions: int64 [axes, tokens], counted from its start.
        advance: Distance from its start to the token after it.
    """

    positions: torch.Tensor
    advance: int

    @property
    def tokens(self) -> int:
        """Number of tokens in the item."""
        return self.positions.shape[1]


def grid_pattern(height: int, width: int) -> Pattern:
    """Return the pattern of an image of `height` rows and `width` columns of tokens.

    All tokens have one position in time, and those of height and width count from the start. The next token follows the
    larger of both (`get_rope_index` in qwen2_vl/modeling_qwen2_vl.py, transformers 5.23).
    """
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    return Pattern(torch.stack([torch.zeros_like(rows), rows, columns]), max(height, width))


def rope_positions(
    kinds: torch.Tensor, lengths: Sequence[int], first: torch.Tensor, patterns: Sequence[Pattern]
) -> tuple[torch.Tensor, PlacedImages]:
    """Return the rotary positions of a prompt on several axes, and its items.

    Text advances by one on all axes. The tokens of an item have the positions of its pattern.

    Args:
        kinds: Index of each token's pattern, -1 on text, int64 [batch, length]. Items are complete.
        lengths: Number of tokens in each row; they are at its end.
        first: Rotary position of each row's first token, int64 [batch].
        patterns: Pattern of each kind of item.

    Returns:
        Positions int64 [axes, batch, length]; and the items, counted from each row's first token.
    """
    positions = torch.zeros((patterns[0].positions.shape[0], *kinds.shape), dtype=torch.int64)
    placed = []
    for row, (values, held) in enumerate(zip(kinds.tolist(), lengths, strict=True)):
        begin = len(values) - held
        position, index, items = 0, begin, []
        while index < len(values):
            if values[index] < 0:
                positions[:, row, index] = position
                position, index = position + 1, index + 1
                continue
            pattern = patterns[values[index]]
            end = index + pattern.tokens
            positions[:, row, index:end] = pattern.positions + position
            position += pattern.advance
            items.append(Placed(index - begin, end - begin, position - (end - begin)))
            index = end
        placed.append(tuple(items))
    return positions + first[None, :, None], PlacedImages(tuple(placed))


def shifted(placed: PlacedImages, lengths: torch.Tensor, deltas: torch.Tensor) -> PlacedImages:
    """Return the images of a prompt after `lengths` tokens in each row, whose rotary positions differ by `deltas`."""
    return PlacedImages(
        tuple(
            tuple(Placed(image.start + length, image.end + length, image.delta + delta) for image in row)
            for row, length, delta in zip(placed.rows, lengths.tolist(), deltas.tolist(), strict=True)
        )
    )


class ItemPositions:
    """Computes the inputs that the steps of a prompt with items take besides embeddings.

    Args:
        stages: Stages of the items.
        methods: Methods of the program.
        device: Device of the inputs.
    """

    def __init__(
        self, stages: tuple[ItemStage, ...], methods: Mapping[str, ProgramMethod], device: torch.device
    ) -> None:
        steps = [each for each in methods.values() if each.is_step]
        extra = {spec.name: spec for step in steps for spec in step.inputs}
        self.stages = stages
        self.device = device
        self.longest_step = max((step.max_length for step in steps if not step.takes_ids), default=0)
        self.stays_whole = IMAGE_IDS.name in extra
        self.has_axes = POSITIONS in extra
        self.sees_prompt = any(one.method.item is not None and one.method.item.sees == "prompt" for one in stages)
        axes = int(extra[POSITIONS].shape[0]) if self.has_axes else 0
        self.patterns = [_pattern(stage, axes) for stage in stages]
        # A method without `item` is from an older bundle, whose items are all seen.
        seen = [stage.method.item is None or stage.method.item.sees for stage in stages]
        self.seen = torch.tensor([index for index, sees in enumerate(seen) if sees])

    def check(self, rows: TokenRows) -> None:
        """Check that each item of a prompt fits one step.

        Raises:
            InputError: If an item is longer than a step, or its rows differ in length and must not.
        """
        if self.has_axes:
            self._check_contiguous(rows)
        if not self.stays_whole or not self._is_seen(rows).any():
            return
        if not rows.are_even:
            raise InputError(
                f"rows must have equal length if the tokens of their items attend to each other, got "
                f"{list(rows.lengths)}; pass rows of equal length"
            )
        whole_chunks(self._ids(rows), self.longest_step)

    def extend(self, steps: Steps, prompt: Prompt, stepper: ProgramStepper) -> Steps:
        """Add the image indices, rotary positions and chunk sizes that this program takes with embeddings."""
        if steps.are_ids or not (self.has_axes or self.stays_whole):
            return steps
        rows = prompt.rows
        extra, sizes, placed = {}, None, None
        if self.stays_whole:
            ids = self._ids(rows)
            sizes = whole_chunks(ids, self.longest_step)
            extra[IMAGE_IDS.name] = ids.to(self.device)
            placed = placed_images(image_ids(self._kinds(rows) >= 0))
        if self.has_axes:
            state = stepper.state
            first = state.length + state.images.deltas(state.length)
            positions, placed = rope_positions(self._kinds(rows), rows.lengths, first, self.patterns)
            extra[POSITIONS] = positions.to(self.device)
        return replace(steps, sizes=sizes, extra=extra, placed=placed)

    def _check_contiguous(self, rows: TokenRows) -> None:
        for index, (stage, pattern) in enumerate(zip(self.stages, self.patterns)):
            for row in (self._kinds(rows) == index).tolist():
                for start, end in runs(row):
                    if (end - start) % pattern.tokens:
                        raise InputError(
                            f"a run of token id {stage.token} must be a multiple of the {pattern.tokens} embeddings "
                            f"that {stage.method.name} gives for an item, got {end - start}; build the prompt with the "
                            "model's own processor"
                        )

    def _kinds(self, rows: TokenRows) -> torch.Tensor:
        """Return the index of the stage of each token's item, -1 on text: int64 [batch, length] on the host."""
        kinds = torch.full(rows.ids.shape, -1, dtype=torch.int64)
        for index, stage in enumerate(self.stages):
            kinds[rows.mask_of(stage.token).cpu()] = index
        return kinds

    def _is_seen(self, rows: TokenRows) -> torch.Tensor:
        return torch.isin(self._kinds(rows), self.seen)

    def _ids(self, rows: TokenRows) -> torch.Tensor:
        seen = self._is_seen(rows)
        return torch.zeros_like(rows.ids) if self.sees_prompt and seen.any() else image_ids(seen)


def _pattern(stage: ItemStage, axes: int) -> Pattern:
    """Return the rotary positions of an item on `axes` axes."""
    tokens, item, grid = stage.tokens_per_item, stage.method.item, stage.method.grid
    if item is not None and item.positions:
        return Pattern(torch.tensor(item.positions), item.advance)
    if item is None and grid is not None:
        time, height, width = grid
        merged = math.isqrt(time * height * width // tokens)
        return grid_pattern(height // merged, width // merged)
    return Pattern(torch.arange(tokens).expand(max(axes, 1), tokens), tokens)
