"""Positions of images in the rows of a session and in a prompt, and chunks that keep them whole."""

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
