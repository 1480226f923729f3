"""Positions of images in a prompt, and chunks that keep them whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import InputError
from ..images import Placed, PlacedImages


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
