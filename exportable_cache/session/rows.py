"""Prompts of a batch, whose rows may differ in length, and the inputs of the steps that feed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError
from .checks import check_ids

if TYPE_CHECKING:
    from .checks import ProgramLimits
    from .images import PlacedImages


@dataclass(frozen=True)
class Segment:
    """Columns of a batch that are fed together: tokens of some rows, while the others wait.

    Attributes:
        start: First column.
        end: Column after the last.
        rows: True for rows that have tokens there, bool [batch] on the host.
    """

    start: int
    end: int
    rows: torch.Tensor


@dataclass(frozen=True)
class TokenRows:
    """Prompts aligned at their ends: `TokenRows(tensor([[5, 6, 7], [8, 8, 9]]), (3, 2), False)` holds 5 6 7 and 8 9.

    Attributes:
        ids: int64 [batch, length], or [batch, length, codebooks], with each row's tokens at its end. The padding is
            the row's first token, because it must be a valid id that occurs in the prompt anyway.
        lengths: Number of tokens in each row.
        are_even: True if all rows have the same length.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    are_even: bool = True

    @property
    def texts(self) -> list[torch.Tensor]:
        """Tokens of each row, int64 [length], without the padding."""
        longest = self.ids.shape[1]
        return [row[longest - length :] for row, length in zip(self.ids, self.lengths, strict=True)]

    def mask_of(self, token: int) -> torch.Tensor:
        """Return True where a prompt has this token, bool [batch, length]; False before a shorter row begins."""
        columns = torch.arange(self.ids.shape[1])[None]
        real = columns >= self.ids.shape[1] - torch.tensor(self.lengths)[:, None]
        return (self.ids == token) & real.to(self.ids.device)

    @classmethod
    def whole(cls, ids: torch.Tensor) -> TokenRows:
        """Return rows of equal length, from int64 [batch, length]."""
        return cls(ids, (ids.shape[1],) * ids.shape[0])

    @classmethod
    def of(cls, prompts: Sequence[torch.Tensor]) -> TokenRows:
        """Return rows from one tensor int64 [length] each."""
        lengths = tuple(len(prompt) for prompt in prompts)
        if len(set(lengths)) == 1:
            return cls(torch.stack(list(prompts)), lengths)
        longest = max(lengths)
        rows = [torch.cat([prompt[:1].expand(longest - len(prompt), *prompt.shape[1:]), prompt]) for prompt in prompts]
        return cls(torch.stack(rows), lengths, are_even=False)

    @classmethod
    def checked(cls, prompts: Any, attention_mask: Any, limits: ProgramLimits) -> TokenRows:
        """Check the prompts of a user, and return their rows.

        Args:
            prompts: int64 [batch, length], or a list of prompts, each int64 [length] or a list of ints.
            attention_mask: [batch, length], 0 on the padding before or after each row's tokens; or None.
            limits: Limits of the program.

        Raises:
            InputError: If either is not valid, a row has no token, or a token is outside the vocabulary.
        """
        if isinstance(prompts, (list, tuple)):
            return cls._from_list(prompts, attention_mask, limits)
        check_ids("input_ids", prompts, ("batch", "length"), limits)
        if attention_mask is None:
            return cls(prompts, (prompts.shape[1],) * prompts.shape[0])
        real = _real(attention_mask, prompts)
        if bool(real.all()):
            return cls.whole(prompts)
        return cls.of([row[mask] for row, mask in zip(prompts, real.to(prompts.device), strict=True)])

    @classmethod
    def _from_list(cls, prompts: Sequence[Any], attention_mask: Any, limits: ProgramLimits) -> TokenRows:
        if attention_mask is not None:
            raise InputError("attention_mask must be None for a list of prompts, which have no padding; leave it out")
        if len(prompts) != limits.batch_size:
            raise InputError(
                f"a list of prompts must have one per row, {limits.batch_size}, got {len(prompts)}; pass "
                f"{limits.batch_size} prompts, or allocate or export with batch_size={len(prompts)}"
            )
        rows = []
        for index, prompt in enumerate(prompts):
            name = f"prompt {index} of the list"
            if not isinstance(prompt, torch.Tensor):
                prompt = _as_tensor(name, prompt, limits.device)
            check_ids(name, prompt, ("length",), limits)
            rows.append(prompt)
        return cls.of(rows)

    def segments(self) -> list[Segment]:
        """Return the columns in order, cut where a row begins.

        Rows end together, so the last step gives the logits of every row.
        """
        longest = self.ids.shape[1]
        starts = torch.tensor([longest - length for length in self.lengths])
        cuts = [*sorted(set(starts.tolist())), longest]
        return [Segment(start, end, starts <= start) for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def _real(attention_mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return True for columns that hold tokens, bool [batch, length] on the host."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape[:2]:
        given = (
            list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
        )
        raise InputError(
            f"attention_mask must have the shape of input_ids, {list(ids.shape[:2])}, got {given}; pass the mask that "
            "the tokenizer gave with them"
        )
    real = attention_mask.cpu() != 0
    for row, mask in enumerate(real):
        columns = mask.nonzero()[:, 0].tolist()
        if not columns:
            raise InputError(
                f"attention_mask must leave at least one token in each row, got none in row {row}: the prompt is empty"
            )
        if columns[-1] - columns[0] + 1 != len(columns):
            raise InputError(
                f"attention_mask must be 0 only before or after the tokens of a row, got a gap in row {row}; remove it"
            )
    return real


def _as_tensor(name: str, prompt: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(prompt, (list, tuple)) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise InputError(f"{name} must be an int64 tensor [length] or a list of token ids, got {prompt!r:.60}")
    return torch.tensor(prompt, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Prompt:
    """A checked prompt, independent of the session's position.

    Attributes:
        rows: Token ids.
        items: Inputs of the encoders for each item, by name of the method.
    """

    rows: TokenRows
    items: Mapping[str, list[tuple[torch.Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """The inputs of the steps that feed a prompt.

    Attributes:
        fed: Token ids int64 [batch, length], or embeddings [batch, length, hidden_size].
        rows: Token ids and lengths of the rows.
        sizes: Number of tokens in each step; None if it is free.
        extra: Further inputs of all steps by name, [..., length].
        first: Further inputs of the first step by name.
        placed: Images, with positions and rotary offsets counted from the first token.
    """

    fed: torch.Tensor
    rows: TokenRows
    sizes: Sequence[int] | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    first: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placed: PlacedImages | None = None

    @property
    def are_ids(self) -> bool:
        """True if tokens are fed by id."""
        return not self.fed.is_floating_point()
