"""Positions of images in the rows of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError


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

    def cut_at(self, place: int) -> list[Placed]:
        """Return the images that have tokens before a position in the cache, and at or after it."""
        return [image for row in self.rows for image in row if image.start < place < image.end]

    def turns(self, first: int, count: int) -> torch.Tensor:
        """Return the rotary positions between two positions in the cache, int64 [batch].

        Args:
            first: First position.
            count: Number of positions up to the second one.
        """
        before, after = (self.deltas(torch.full((len(self.rows),), place)) for place in (first, first + count))
        return count + after - before

    def without(self, first: int, count: int) -> PlacedImages:
        """Return the images of rows that lose `count` tokens from position `first` on.

        Raises:
            InputError: If that would drop a part of an image.
        """
        last, rows = first + count, []
        for name, place in (("first", first), ("first + count", last)):
            for image in self.cut_at(place)[:1]:
                raise InputError(
                    f"{name} must not be inside the image at {image.start} to {image.end - 1}, got {place}; drop all "
                    "of it, or none"
                )
        for row, turn in zip(self.rows, self.turns(first, count).tolist(), strict=True):
            kept = []
            for image in row:
                if image.end <= first:
                    kept.append(image)
                elif image.start >= last:
                    kept.append(Placed(image.start - count, image.end - count, image.delta + count - turn))
            rows.append(tuple(kept))
        return PlacedImages(tuple(rows))

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


def shifted(placed: PlacedImages, lengths: torch.Tensor, deltas: torch.Tensor) -> PlacedImages:
    """Return the images of a prompt after `lengths` tokens in each row, whose rotary positions differ by `deltas`."""
    return PlacedImages(
        tuple(
            tuple(Placed(image.start + length, image.end + length, image.delta + delta) for image in row)
            for row, length, delta in zip(placed.rows, lengths.tolist(), deltas.tolist(), strict=True)
        )
    )


def seen_tiles(images: Sequence[Placed], tiles: torch.Tensor, positions: range) -> torch.Tensor:
    """Return 1 for the tiles that each token attends to, int64 [items * tiles, length].

    These are the tiles of the nearest run of adjacent images at or before the token
    (`get_cross_attention_token_mask` in mllama/processing_mllama.py, transformers 5.23).

    Args:
        images: Images of a row, oldest first, in the order of `tiles`.
        tiles: 1 for real tiles, int64 [items, tiles].
        positions: Positions of the tokens.
    """
    seen = torch.zeros(*tiles.shape, len(positions), dtype=torch.int64)
    first = 0
    for index, image in enumerate(images):
        if index and images[index - 1].end != image.start:
            first = index
        # Written to the end, because the next image overwrites or extends it.
        for column in range(max(image.start - positions.start, 0), len(positions)):
            seen[:, :, column] = 0
            seen[first : index + 1, :, column] = tiles[first : index + 1]
    return seen.flatten(0, 1)
