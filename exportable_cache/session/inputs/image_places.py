"""Where images lie in a prompt, and what follows from it: blocks that stay whole, and positions of three axes."""

from __future__ import annotations

from collections.abc import Sequence
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
    def from_saved(cls, rows: list[list[list[int]]], lengths: Sequence[int]) -> PlacedImages:
        """Return what `to_lists` gave, checked.

        Args:
            lengths: Most tokens that each row ever held.

        Raises:
            ValueError: If it is something else, or an image lies outside of its row.
        """
        found = cls(tuple(tuple(Placed(*image) for image in row) for row in rows))
        if len(found.rows) != len(lengths):
            raise ValueError(f"images of {len(found.rows)} rows, of {len(lengths)}")
        for row, length in zip(found.rows, lengths, strict=True):
            behind = 0
            for image in row:
                numbers = (image.start, image.end, image.delta)
                if any(type(number) is not int or abs(number) >= 2**62 for number in numbers):
                    raise ValueError(f"an image at {numbers!r}")
                if not behind <= image.start < image.end <= length:
                    raise ValueError(f"an image at {image.start} to {image.end}, of {length} tokens")
                behind = image.end
        return found

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


@dataclass(frozen=True)
class Pattern:
    """Rotary positions of an item.

    Attributes:
        positions: int64 [axes, tokens], counted from where it starts.
        advance: From there to the token behind it.
    """

    positions: torch.Tensor
    advance: int

    @property
    def tokens(self) -> int:
        """Of the item."""
        return self.positions.shape[1]


def grid_pattern(height: int, width: int) -> Pattern:
    """An image of so many rows and columns of tokens: it stands still in time, its height and width count from where it
    starts, and what follows goes on after the larger of both (`get_rope_index` in qwen2_vl/modeling_qwen2_vl.py,
    transformers 5.23).
    """
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    return Pattern(torch.stack([torch.zeros_like(rows), rows, columns]), max(height, width))


def rope_positions(
    kinds: torch.Tensor, lengths: Sequence[int], first: torch.Tensor, patterns: Sequence[Pattern]
) -> tuple[torch.Tensor, PlacedImages]:
    """Positions of several axes, and where the items are, counted from each row's first token.

    Text counts on by one on all of them; the tokens of an item have those of its pattern.

    Args:
        kinds: int64 [batch, length], which pattern each token is of, -1 on text; items whole.
        lengths: Tokens of each row, which are its last.
        first: int64 [batch], rotary position of each row's first token.
        patterns: Of the kinds of items.

    Returns:
        int64 [axes, batch, length]; and the items, their deltas counted from `first`.
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
    """The images of a prompt as they lie behind the `lengths` tokens of each row, whose rotary positions were off by
    `deltas`.
    """
    return PlacedImages(
        tuple(
            tuple(Placed(image.start + length, image.end + length, image.delta + delta) for image in row)
            for row, length, delta in zip(placed.rows, lengths.tolist(), deltas.tolist(), strict=True)
        )
    )
