"""Where images lie in a prompt, and what follows from it: blocks that stay whole, and positions of three axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...errors import InputError


@dataclass(frozen=True)
class Placed:
    """One image among the tokens of a row.

    Attributes:
        start: Position of its first token in the cache.
        end: Position after its last.
        delta: What is added to positions in the cache after it to get rotary positions, of models whose images count as
            fewer positions than tokens; 0 otherwise.
    """

    start: int
    end: int
    delta: int = 0


@dataclass(frozen=True)
class PlacedImages:
    """The images that the rows of a session hold, oldest first: `PlacedImages(((Placed(2, 6, -2),), ()))` at batch
    size 2.
    """

    rows: tuple[tuple[Placed, ...], ...]

    @classmethod
    def none(cls, batch_size: int) -> PlacedImages:
        """Of rows that hold text only."""
        return cls(((),) * batch_size)

    @classmethod
    def from_lists(cls, rows: Iterable[Iterable[Iterable[int]]]) -> PlacedImages:
        """What `to_lists` gave."""
        return cls(tuple(tuple(Placed(*image) for image in row) for row in rows))

    def to_lists(self) -> list[list[list[int]]]:
        """JSON."""
        return [[[image.start, image.end, image.delta] for image in row] for row in self.rows]

    def deltas(self, lengths: torch.Tensor) -> torch.Tensor:
        """What is added to a position in the cache to get the rotary one of the next token, int64 [batch].

        Args:
            lengths: int64 [batch], tokens of each row.
        """
        found = [
            next((image.delta for image in reversed(row) if image.end <= length), 0)
            for row, length in zip(self.rows, lengths.tolist(), strict=True)
        ]
        return torch.tensor(found, dtype=torch.int64)

    def followed_by(self, other: PlacedImages) -> PlacedImages:
        """With those of later tokens."""
        return PlacedImages(tuple(before + after for before, after in zip(self.rows, other.rows, strict=True)))

    def begun(self, lengths: torch.Tensor) -> PlacedImages:
        """Those of which rows that hold `lengths` tokens, int64 [batch], hold at least the first."""
        return PlacedImages(
            tuple(
                tuple(image for image in row if image.start < length)
                for row, length in zip(self.rows, lengths.tolist(), strict=True)
            )
        )

    def up_to(self, lengths: torch.Tensor) -> PlacedImages:
        """Those that are left when rows are cut to `lengths`, int64 [batch].

        Raises:
            InputError: If the cut goes through one: its tokens are no prompt by themselves.
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
    """Start and end of each stretch of image tokens: `runs([False, True, True])` is `[(1, 3)]`."""
    found, start = [], None
    for index, value in enumerate([*is_image, False]):
        if value and start is None:
            start = index
        elif not value and start is not None:
            found.append((start, index))
            start = None
    return found


def image_ids(is_image: torch.Tensor) -> torch.Tensor:
    """A number per stretch of image tokens, -1 on text: int64 [batch, length] of bool [batch, length]."""
    ids = torch.full(is_image.shape, -1, dtype=torch.int64)
    for row, values in enumerate(is_image.tolist()):
        for number, (start, end) in enumerate(runs(values)):
            ids[row, start:end] = number
    return ids


def placed_images(ids: torch.Tensor) -> PlacedImages:
    """The images of a prompt, counted from its first token.

    Args:
        ids: What `image_ids` gave.
    """
    return PlacedImages(
        tuple(tuple(Placed(start, end) for start, end in runs([i >= 0 for i in row])) for row in ids.tolist())
    )


def whole_chunks(ids: torch.Tensor, longest: int) -> list[int]:
    """Sizes of the chunks of a prompt, none of them ending inside an image of any row.

    Args:
        ids: What `image_ids` gave.
        longest: Most tokens of a chunk.

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
                f"the image at token {start} of the prompt takes {block} tokens, which see each other and so go "
                f"through in one step, and a step takes at most {longest}; make the session, or export, with "
                f"prefill_chunk={block} or more"
            )
        sizes.append(end - start)
        start = end
    return sizes


def rope_positions(
    is_image: torch.Tensor, first: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, PlacedImages]:
    """Positions of three axes (time, height, width), and where the images are, counted from the first token.

    Text counts on by one in all three. An image stands still in time, its height and width count from where it starts,
    and what follows goes on after the larger of both (`get_rope_index` in qwen2_vl/modeling_qwen2_vl.py, transformers
    5.23).

    Args:
        is_image: bool [batch, length], images whole.
        first: int64 [batch], rotary position of each row's first token.
        size: Rows and columns of an image's tokens.

    Returns:
        int64 [3, batch, length]; and the images, their deltas counted from `first`.
    """
    height, width = size
    tokens = height * width
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    axes = torch.stack([torch.zeros_like(rows), rows, columns])
    positions = torch.zeros((3, *is_image.shape), dtype=torch.int64)
    placed = []
    for row, values in enumerate(is_image.tolist()):
        position, index, images = 0, 0, []
        for start, end in [*runs(values), (len(values), len(values))]:
            positions[:, row, index:start] = torch.arange(position, position + start - index)
            position += start - index
            for image in range(start, end, tokens):
                positions[:, row, image : image + tokens] = axes + position
                position += max(size)
                images.append(Placed(image, image + tokens, position - (image + tokens)))
            index = end
        placed.append(tuple(images))
    return positions + first[None, :, None], PlacedImages(tuple(placed))


def shifted(placed: PlacedImages, lengths: torch.Tensor, deltas: torch.Tensor) -> PlacedImages:
    """The images of a prompt as they lie behind the `lengths` tokens of each row, whose rotary positions were off by
    `deltas`.
    """
    return PlacedImages(
        tuple(
            tuple(Placed(image.start + length, image.end + length, image.delta + delta) for image in row)
            for row, length, delta in zip(placed.rows, lengths.tolist(), deltas.tolist(), strict=True)
        )
    )
