"""Where each row is in its sequence, as one value: what is saved, restored and forked beside the cache's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..models.positions import MIXED
from .inputs.image import PlacedImages

if TYPE_CHECKING:
    from ..cache.layers import CacheLayer
    from ..models.positions import RopeRule

#: High-water mark of a cache whose history is unknown: as if every slot had been overwritten.
UNKNOWN = 2**62


@dataclass(frozen=True)
class RopeState:
    """The factors that the rows of a session were computed with.

    Attributes:
        lengths: The length that each row's last call chose its factors by, int64 [batch], 0 at the start.
        factors: The factors of the keys that each row holds, see `RopeRule.factors`, int64 [batch]; `MIXED` where they
            are several, or not known.
        tokens: Ids that each row holds, int64 on the host, as many as come before the border: what is computed again
            past it. None where they are not known, and for models that do not compute them again. They may be more than
            the row holds, after a rewind.
    """

    lengths: torch.Tensor
    factors: torch.Tensor
    tokens: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, length: torch.Tensor) -> RopeState:
        """Return the state of rows that hold `length` tokens, int64 [batch], of which nothing more is known."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(length, torch.full_like(length, MIXED), tuple(none if held == 0 else None for held in length))

    def with_row(self, row: int, length: int) -> RopeState:
        """Return it with a row that holds `length` tokens, of which nothing more is known."""
        mine, other = torch.arange(len(self.lengths)) == row, RopeState.of(torch.tensor([length]))
        return RopeState(
            torch.where(mine, other.lengths, self.lengths),
            torch.where(mine, other.factors, self.factors),
            tuple(other.tokens[0] if index == row else one for index, one in enumerate(self.tokens)),
        )

    def select(self, rows: list[int]) -> RopeState:
        """Return the rows of these indices."""
        return RopeState(self.lengths[rows], self.factors[rows], tuple(self.tokens[row] for row in rows))

    def fed(
        self, rule: RopeRule, held: torch.Tensor, lengths: torch.Tensor, fed: torch.Tensor | None, rows: torch.Tensor
    ) -> RopeState:
        """Return the state after a step.

        Args:
            rule: Of the model.
            held: Tokens that each row held before it, int64 [batch].
            lengths: Those that its factors were chosen by, int64 [batch].
            fed: Token ids [batch, length], embeddings, or None where they are not known.
            rows: Rows whose tokens count, bool [batch] on the host.
        """
        factors = rule.factors(lengths)
        same = (held == 0) | (factors == self.factors)
        return RopeState(
            torch.where(rows, lengths, self.lengths),
            torch.where(rows, torch.where(same, factors, MIXED), self.factors),
            self._tokens_after(rule, held, fed, rows) if rule.recomputes else self.tokens,
        )

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
        """Return it with rows at position 0, bool [batch] on the host."""
        none = torch.zeros(0, dtype=torch.int64)
        return replace(
            self,
            lengths=self.lengths * ~rows,
            tokens=tuple(none if is_empty else one for one, is_empty in zip(self.tokens, rows.tolist(), strict=True)),
        )


@dataclass(frozen=True)
class SequenceState:
    """The rows of a session, without their keys and values. Every change gives a new one; no tensor is written in
    place.

    Attributes:
        length: Tokens that each row holds, int64 [batch] on the host.
        max_len_ever: The most that each ever held since position 0, int64 [batch]: what a rewind leaves behind in a
            ring depends on it.
        unfed: The newest token of each row that a generation gave out, while nothing was fed since and it ended
            nothing.
        images: Images that rewinding may not cut, or after which rotary positions are not those in the cache.
        encoded: What an encoder gave, hidden states [batch, encoder_length, hidden_size] and their number per row;
            empty without one, or before its first run.
        rope: Factors of RoPE that the rows were computed with; None where they are the same at every length.
    """

    length: torch.Tensor
    max_len_ever: torch.Tensor
    unfed: tuple[int | None, ...]
    images: PlacedImages
    encoded: tuple[torch.Tensor, ...] = ()
    rope: RopeState | None = None

    @classmethod
    def empty(cls, batch_size: int, encoded: tuple[torch.Tensor, ...] = ()) -> SequenceState:
        """Rows at position 0."""
        zeros = torch.zeros(batch_size, dtype=torch.int64)
        return cls(zeros, zeros, (None,) * batch_size, PlacedImages.none(batch_size), encoded)

    @classmethod
    def of_layers(cls, layers: Sequence[CacheLayer], length: torch.Tensor) -> SequenceState:
        """Of a cache that is in use, whose rows hold `length` tokens, int64 [batch]."""
        marks = [layer._max_len_ever for layer in layers] if bool(length.any()) else [0]
        most = max(UNKNOWN if mark is None else mark for mark in marks)
        ever = torch.maximum(length, torch.tensor(most))
        return replace(cls.empty(len(length)), length=length, max_len_ever=ever)

    @property
    def has_begun(self) -> bool:
        """Whether any row holds a token."""
        return bool(self.length.any())

    @property
    def most_ever(self) -> int | None:
        """The most tokens that any row ever held, or None where the history of the cache is unknown."""
        most = int(self.max_len_ever.max())
        return None if most >= UNKNOWN else most

    def emptied(self) -> SequenceState:
        """At position 0 again; what was encoded stays."""
        emptied = self.empty(len(self.length), self.encoded)
        return emptied if self.rope is None else replace(emptied, rope=RopeState.of(emptied.length))

    def reaching(self, tokens: int, rows: torch.Tensor | None = None) -> SequenceState:
        """About to run a step of `tokens` for `rows`, bool [batch], or all: should it fail halfway, slots may have been
        written.
        """
        # A row that waits at position 0 starts there: what is written meanwhile leaves nothing behind.
        end = self.length + tokens
        if rows is not None:
            end = end * (rows | (self.length > 0))
        return replace(self, max_len_ever=torch.maximum(self.max_len_ever, end))

    def fed(self, tokens: int, rows: torch.Tensor | None = None) -> SequenceState:
        """With `tokens` more in `rows`, bool [batch], or in all."""
        length = self.length + (tokens if rows is None else tokens * rows)
        return replace(self, length=length, unfed=(None,) * len(self.unfed))

    def with_row(self, row: int, length: int) -> SequenceState:
        """With a row of which others have written the state."""
        mine = torch.arange(len(self.length)) == row
        return replace(
            self,
            length=torch.where(mine, length, self.length),
            max_len_ever=torch.where(mine, length, self.max_len_ever),
            rope=None if self.rope is None else self.rope.with_row(row, length),
        )

    def rewound(self, tokens: int, layers: Sequence[CacheLayer]) -> SequenceState:
        """Without the newest `tokens` of every row.

        Raises:
            InputError: If a row holds fewer, or a layer or an image rules it out.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise InputError(f"cannot rewind {tokens!r} tokens; pass an int of at least 0")
        lengths = self.length.tolist()
        if tokens > min(lengths):
            raise InputError(f"cannot rewind {tokens} tokens, rows hold {lengths}; rewind at most {min(lengths)}")
        # A row that is left with no token starts anew, whatever its layers keep.
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
