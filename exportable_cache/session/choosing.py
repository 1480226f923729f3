"""How the tokens of one generation are chosen: what the caller asks for, over what the checkpoint asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..generation.checkpoint_settings import RowStart
from ..generation.sampling import Sampler

if TYPE_CHECKING:
    import torch

    from ..generation.sampling import Sampling
    from .rows import TokenRows
    from .session import Session


def sampler_after(
    session: Session,
    sampling: Sampling,
    rows: TokenRows,
    limit: int | None,
    held: Sequence[int] | None = None,
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Sampler:
    """Return the sampler of a generation, which follows the settings of the checkpoint as well.

    Args:
        sampling: How tokens are chosen. A repetition penalty comes before the checkpoint's.
        rows: Prompts.
        limit: Largest number of new tokens, with what fits the cache in mind; None if there is no limit.
        held: Number of tokens that each row held before its prompt; none by default.
        agree: See `Sampler`.

    Raises:
        InputError: If a setting of the checkpoint is not what it has to be.
    """
    settings = session.generation_settings
    if sampling.repetition_penalty is None and settings.repetition_penalty is not None:
        sampling = replace(sampling, repetition_penalty=settings.repetition_penalty)
    texts, encoded = rows.texts, rows.texts
    if session.has_encoder:
        # By identity, because a state that was loaded has been encoded elsewhere.
        known, encoder = session.encoded_ids, session.sequence.encoded
        encoded = known[1] if known is not None and encoder and encoder[0] is known[0] else []
    starts = [
        RowStart(ids, 0 if held is None else held[row], limit, encoded[row] if encoded else None)
        for row, ids in enumerate(texts)
    ]
    rules = settings.row_rules(starts, sampling.repetition_penalty)
    return Sampler(sampling, rows.ids, session.vocab_size, agree, rules)


def default_limit(
    session: Session, asked: int | None, rows: TokenRows, held: Sequence[int] | None = None
) -> int | None:
    """Return the limit of new tokens that was asked for, or else that of the checkpoint; None if neither has one.

    Raises:
        InputError: If the checkpoint's limit of all tokens leaves no room for a new one.
    """
    if asked is not None:
        return asked
    before = [0] * len(rows.lengths) if held is None else held
    return session.generation_settings.limit(max(map(sum, zip(before, rows.lengths, strict=True))))
