"""What rows have to remember where their model's RoPE changes with the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..models.positions import MIXED

if TYPE_CHECKING:
    from ..models.positions import RopeRule


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
