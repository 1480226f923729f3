"""Lengths of the rows of a session and what belongs to them: one value, saved and forked with the cache's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..cache.policies import CircularPolicy
from ..errors import InputError
from ..models.positions import MIXED
from .images import PlacedImages, seen_tiles

if TYPE_CHECKING:
    from ..cache.layers import CacheLayer
    from ..models.positions import RopeRule

#: High-water mark of a cache whose history is unknown: as if every slot had been overwritten.
UNKNOWN = 2**62


@dataclass(frozen=True)
class RopeState:
    """The factors that the rows of a session were computed with, for models whose RoPE changes with the length.

    Attributes:
        lengths: Length that each row's last call chose its factors by, int64 [batch]; 0 at the start.
        factors: Factors of the keys that each row holds, see `RopeRule.factors`, int64 [batch]; `MIXED` if they differ
            or are not known.
        tokens: Ids that each row holds before the border, int64 on the host, to compute them again after it. None if
            they are not known, or the model does not compute them again. After a rewind they may be more than the row
            holds.
        written: Length that chose the factors of each key that a row holds, int64 on the host; None if it is not known.
            After a rewind they may be more than the row holds.
        shifted: True for rows that have dropped tokens, bool [batch] on the host. They cannot be computed again,
            because their keys follow from what they dropped.
    """

    lengths: torch.Tensor
    factors: torch.Tensor
    tokens: tuple[torch.Tensor | None, ...]
    written: tuple[torch.Tensor | None, ...]
    shifted: torch.Tensor

    @classmethod
    def of(cls, length: torch.Tensor) -> RopeState:
        """Return the state of rows of which only the length is known, int64 [batch]."""
        none = torch.zeros(0, dtype=torch.int64)
        known = tuple(none if held == 0 else None for held in length)
        return cls(length, torch.full_like(length, MIXED), known, known, torch.zeros_like(length, dtype=torch.bool))

    def with_row(self, row: int, length: int) -> RopeState:
        """Return the state with a row of which only the length is known."""
        is_row, other = torch.arange(len(self.lengths)) == row, RopeState.of(torch.tensor([length]))
        return RopeState(
            torch.where(is_row, other.lengths, self.lengths),
            torch.where(is_row, other.factors, self.factors),
            tuple(other.tokens[0] if index == row else one for index, one in enumerate(self.tokens)),
            tuple(other.written[0] if index == row else one for index, one in enumerate(self.written)),
            self.shifted & ~is_row,
        )

    def select(self, rows: list[int]) -> RopeState:
        """Return the state of the rows at these indices."""
        tokens, written = (tuple(one[row] for row in rows) for one in (self.tokens, self.written))
        return RopeState(self.lengths[rows], self.factors[rows], tokens, written, self.shifted[rows])

    def fed(
        self,
        rule: RopeRule,
        held: torch.Tensor,
        lengths: torch.Tensor,
        fed: torch.Tensor | None,
        rows: torch.Tensor,
        added: int,
    ) -> RopeState:
        """Return the state after a step.

        Args:
            rule: Rule of the model.
            held: Number of tokens in each row before the step, int64 [batch].
            lengths: Lengths that the factors were chosen by, int64 [batch].
            fed: Token ids [batch, length], embeddings, or None if they are not known.
            rows: Rows that advance, bool [batch] on the host.
            added: Number of tokens that these rows get.
        """
        factors = rule.factors(lengths)
        same = (held == 0) | (factors == self.factors)
        return RopeState(
            torch.where(rows, lengths, self.lengths),
            torch.where(rows, torch.where(same, factors, MIXED), self.factors),
            self._tokens_after(rule, held, fed, rows) if rule.recomputes else self.tokens,
            self._written_after(held, lengths, rows, added),
            self.shifted & ~(rows & (held == 0)),
        )

    def _written_after(
        self, held: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, added: int
    ) -> tuple[torch.Tensor | None, ...]:
        after = []
        known = zip(self.written, held.tolist(), lengths.tolist(), rows.tolist(), strict=True)
        for one, before, length, counts in known:
            if counts:
                one = torch.zeros(0, dtype=torch.int64) if before == 0 else one
                one = None if one is None else torch.cat([one[:before], torch.full((added,), length)])
            after.append(one)
        return tuple(after)

    def moved(self, rule: RopeRule, held: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor) -> RopeState:
        """Return the state after the keys of `rows` were rotated to the factors of other lengths.

        Args:
            rule: Rule of the model.
            held: Number of tokens in each row, int64 [batch].
            kept: Length that chose the factors, int64 [batch].
            rows: The rows, bool [batch] on the host.
        """
        each = list(zip(held.tolist(), kept.tolist(), rows.tolist(), strict=True))
        return RopeState(
            torch.where(rows, kept, self.lengths),
            torch.where(rows, rule.factors(kept), self.factors),
            tuple(None if counts else one for one, (_, _, counts) in zip(self.tokens, each, strict=True)),
            tuple(
                torch.full((number,), length) if counts else one
                for one, (number, length, counts) in zip(self.written, each, strict=True)
            ),
            self.shifted | rows,
        )

    def unknown_rows(self, held: torch.Tensor) -> list[int]:
        """Return the rows with keys of unknown factors, for `held` tokens in each row, int64 [batch]."""
        known = [0 if one is None else len(one) for one in self.written]
        return [row for row, number in enumerate(held.tolist()) if known[row] < number]

    def chosen_by(self, held: torch.Tensor, slots: int) -> torch.Tensor:
        """Return the length that chose the factors of each position, int64 [batch, slots]; 1 past the end of a row.

        Args:
            held: Number of tokens in each row, int64 [batch].
            slots: Number of positions.
        """
        found = torch.ones(len(self.written), slots, dtype=torch.int64)
        for row, (one, number) in enumerate(zip(self.written, held.tolist(), strict=True)):
            if one is not None:
                found[row, :number] = one[:number]
        return found

    def _tokens_after(
        self, rule: RopeRule, held: torch.Tensor, fed: torch.Tensor | None, rows: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        if fed is None or fed.is_floating_point():
            return tuple(None if counts else one for one, counts in zip(self.tokens, rows.tolist(), strict=True))
        known, after = zip(self.tokens, held.tolist(), rows.tolist(), strict=True), []
        ids: torch.Tensor | None = None
        for index, (one, before, counts) in enumerate(known):
            if before == 0 and counts:
                one = torch.zeros(0, dtype=torch.int64)
            if one is not None and counts and before < rule.border:
                ids = fed.cpu() if ids is None else ids
                one = torch.cat([one[:before], ids[index, : rule.border - before]])
            after.append(one)
        return tuple(after)

    def emptied(self, rows: torch.Tensor) -> RopeState:
        """Return the state with `rows`, bool [batch] on the host, at position 0."""
        none = torch.zeros(0, dtype=torch.int64)
        return replace(
            self,
            lengths=self.lengths * ~rows,
            tokens=tuple(none if is_empty else one for one, is_empty in zip(self.tokens, rows.tolist(), strict=True)),
            written=tuple(none if is_empty else one for one, is_empty in zip(self.written, rows.tolist(), strict=True)),
            shifted=self.shifted & ~rows,
        )


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a slot. Steps read the slot here, so that no row uses a slot after it was given to another adapter.

    Attributes:
        slot: Index of the slot; 0 after the adapter was unloaded.
        loads: Number of times that the slot's content changed.
        name: Name of the adapter.
        digest: Sha256 of its tensors, which saved states record.
    """

    slot: int = 0
    loads: int = 0
    name: str = ""
    digest: str = ""

    @property
    def described(self) -> list[str]:
        """Name and digest, each empty for the model itself."""
        return [self.name, self.digest] if self.slot else ["", ""]


@dataclass(frozen=True)
class SequenceState:
    """The rows of a session without their keys and values. Every change returns a new state.

    The state owns its tensors: none is written in place. `ProgramStepper._call` copies the length for the program, and
    `Session.length` for users. Everything else reads it.

    Attributes:
        length: Number of tokens in each row, int64 [batch] on the host.
        max_len_ever: The most that each row held since position 0, int64 [batch]. What a rewind leaves in a ring
            depends on it.
        unfed: The newest token of each row that a generation gave out. None if something was fed since, or the token
            ended the row.
        images: Images that a rewind may not cut, or after which rotary positions differ from those in the cache.
        encoded: Output of the encoder: hidden states [batch, encoder_length, hidden_size] and their number per row;
            empty without an encoder, or before its first run.
        rope: Factors of RoPE that the rows were computed with; None if they are the same at every length.
    """

    length: torch.Tensor
    max_len_ever: torch.Tensor
    unfed: tuple[int | None, ...]
    images: PlacedImages
    encoded: tuple[torch.Tensor, ...] = ()
    rope: RopeState | None = None

    @classmethod
    def empty(cls, batch_size: int, encoded: tuple[torch.Tensor, ...] = ()) -> SequenceState:
        """Return the state of rows at position 0."""
        zeros = torch.zeros(batch_size, dtype=torch.int64)
        return cls(zeros, zeros, (None,) * batch_size, PlacedImages.none(batch_size), encoded)

    @classmethod
    def of_layers(cls, layers: Sequence[CacheLayer], length: torch.Tensor) -> SequenceState:
        """Return the state of a cache in use, whose rows hold `length` tokens, int64 [batch]."""
        marks = [layer._max_len_ever for layer in layers] if bool(length.any()) else [0]
        most = max(UNKNOWN if mark is None else mark for mark in marks)
        ever = torch.maximum(length, torch.tensor(most))
        return replace(cls.empty(len(length)), length=length, max_len_ever=ever)

    @cached_property
    def longest(self) -> int:
        """Number of tokens in the fullest row."""
        return int(self.length.max())

    @property
    def common_length(self) -> int | None:
        """Number of tokens in every row, or None if rows differ."""
        return self.longest if int(self.length.min()) == self.longest else None

    @property
    def has_begun(self) -> bool:
        """True if any row holds a token."""
        return self.longest > 0

    @property
    def most_ever(self) -> int | None:
        """The most tokens that any row ever held, or None if the history of the cache is unknown."""
        most = int(self.max_len_ever.max())
        return None if most >= UNKNOWN else most

    def emptied(self) -> SequenceState:
        """Return the state at position 0; the output of the encoder stays."""
        emptied = self.empty(len(self.length), self.encoded)
        return emptied if self.rope is None else replace(emptied, rope=RopeState.of(emptied.length))

    def reaching(self, tokens: int, rows: torch.Tensor | None = None) -> SequenceState:
        """Return the state at the start of a step: if it fails halfway, its slots may have been written.

        Args:
            tokens: Number of tokens in the step.
            rows: Rows that advance, bool [batch]; all by default.
        """
        # A row that waits at position 0 starts there, so what is written after it does not matter.
        end = self.length + tokens
        if rows is not None:
            end = end * (rows | (self.length > 0))
        return replace(self, max_len_ever=torch.maximum(self.max_len_ever, end))

    def fed(self, tokens: int, rows: torch.Tensor | None = None) -> SequenceState:
        """Return the state with `tokens` more in `rows`, bool [batch], or in all."""
        length = self.length + (tokens if rows is None else tokens * rows)
        return replace(self, length=length, unfed=(None,) * len(self.unfed))

    def with_row(self, row: int, length: int, ever: int | None = None) -> SequenceState:
        """Return the state with the length of a row replaced, and the most it ever held, which is `length` if None."""
        is_row = torch.arange(len(self.length)) == row
        return replace(
            self,
            length=torch.where(is_row, length, self.length),
            max_len_ever=torch.where(is_row, length if ever is None else ever, self.max_len_ever),
            rope=None if self.rope is None else self.rope.with_row(row, length),
        )

    def seen_tiles(self, spec_size: int, length: int) -> torch.Tensor:
        """Return 1 for the tiles that the next `length` text tokens attend to, int64 [batch, spec_size, length].

        `spec_size` is items * tiles.
        """
        batch_size = len(self.length)
        if not self.encoded:
            return torch.zeros(batch_size, spec_size, length, dtype=torch.int64)
        tiles = self.encoded[1]
        return torch.stack(
            [
                seen_tiles(images, of_row, range(first, first + length))
                for images, of_row, first in zip(self.images.rows, tiles.cpu(), self.length.tolist(), strict=True)
            ]
        )

    def dropped(self, first: int, count: int, layers: Sequence[CacheLayer]) -> SequenceState:
        """Return the state without `count` tokens of every row from position `first` on.

        Raises:
            InputError: If a number is out of range, a ring would lack tokens that its window sees, an image would be
                cut, or it is not known which factors of RoPE the keys have.
        """
        for name, value, least in (("count", count, 1), ("first", first, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} must be an int of at least {least}, got {value!r}")
        if self.encoded and any(image.end > first for row in self.images.rows for image in row):
            raise InputError(
                f"first must be after the images of the rows, got {first}, because text attends to them by their "
                "order; reset() and feed the tokens to keep"
            )
        if self.rope is not None and (unknown := self.rope.unknown_rows(self.length)):
            raise InputError(
                f"row {unknown[0]} must hold tokens that the session has been fed, to shift a model "
                "whose RoPE changes with the length; reset(), and feed the tokens to keep"
            )
        images = self.images.without(first, count)
        most = self.most_dropped(first, layers)
        if count > most:
            raise InputError(
                f"count must be at most {most} from position {first} on, got {count}: rows hold "
                f"{self.length.tolist()} tokens, and the newest ones of a sliding window stay; drop fewer tokens, or "
                "protect fewer"
            )
        ever = self.max_len_ever - count
        wrapped = [layer.policy for layer in layers if layer.policy.wraps(int(self.max_len_ever.max()))]
        if first and wrapped:
            # As if the slots before the protected tokens were overwritten, because rings do not hold those.
            ever = torch.maximum(ever, torch.tensor(first + max(policy.slot_count for policy in wrapped)))
        length = self.length - count
        return replace(self, length=length, max_len_ever=torch.maximum(ever, length), images=images)

    def most_dropped(self, first: int, layers: Sequence[CacheLayer]) -> int:
        """Return the most tokens that can be dropped from position `first` on; below 1 if none can."""
        if self.images.cut_at(first) or (self.rope is not None and self.rope.unknown_rows(self.length)):
            return 0
        after = int(self.length.min()) - first
        rings = [layer.policy for layer in layers if layer.policy.wraps(int(self.max_len_ever.max()))]
        windows = [policy.window for policy in rings if isinstance(policy, CircularPolicy)]
        return after - max((window - 1 for window in windows), default=0) if first else after

    def whole_drop(self, first: int, count: int, most: int) -> int:
        """Return the number of tokens to drop from position `first` on, so that no image is cut; 0 if there is none.

        Args:
            first: First dropped position, not inside an image.
            count: Number of tokens to drop if no image is cut: the first larger number, else the first smaller one.
            most: Largest number.
        """
        larger, smaller = count, count
        while cut := self.images.cut_at(first + larger):
            larger = max(image.end for image in cut) - first
        while cut := self.images.cut_at(first + smaller):
            smaller = min(image.start for image in cut) - first
        return larger if larger <= most else max(0, smaller)

    def rewound(self, tokens: int, layers: Sequence[CacheLayer]) -> SequenceState:
        """Return the state without the newest `tokens` of every row.

        Raises:
            InputError: If a row holds fewer, or a layer or an image does not allow it.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise InputError(f"tokens must be an int of at least 0, got {tokens!r}")
        lengths = self.length.tolist()
        if tokens > min(lengths):
            raise InputError(f"cannot rewind {tokens} tokens, rows hold {lengths}; rewind at most {min(lengths)}")
        # A row that is left empty can always be rewound, because it starts at position 0 again.
        kept = [row for row in zip(lengths, self.max_len_ever.tolist(), strict=True) if row[0] != tokens]
        found = ((layer.max_rollback(*row), layer.forgetting) for layer in layers for row in kept)
        allowed, reason = min(found, default=(tokens, ""))
        if tokens > allowed:
            raise InputError(
                f"cannot rewind {tokens} tokens at a length of {lengths}: {reason}, "
                f"at most {allowed} can be taken back; reset() and prefill the tokens to keep"
            )
        images = self.images.up_to(self.length - tokens)
        return replace(self, length=self.length - tokens, unfed=(None,) * len(self.unfed), images=images)
