"""Measure how many proposed tokens of a program's draft head are accepted, on a text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from ..bundle.manifest import Acceptance
from ..cache.layer_spec import DRAFTED
from ..common.progress import silent
from ..generation.sampling import Sampler, Sampling
from ..generation.speculative import SpeculationStatistics, TrainedDraft, generate_speculative

if TYPE_CHECKING:
    from ..common.progress import Progress
    from ..session.session import Session

#: Most generations, and most tokens of the prompt and of the generation of each.
_PIECES, _PROMPT, _GENERATED = 8, 64, 64


def measure_acceptance(session: Session, ids: list[int], progress: Progress = silent) -> Acceptance:
    """Generate greedily after pieces of a text with the draft head, and return the shares of accepted proposals.

    Args:
        session: A session with a draft head and a method that scores proposals; it is reset.
        ids: Tokens of the text.
        progress: Called with each piece.

    Raises:
        InputError: If the session has no draft head, or cannot take proposals back.
    """
    room = session.max_length or 2 * (_PROMPT + _GENERATED)
    length = min(_PROMPT, room // 2, len(ids))
    count = min(_GENERATED, room - length)
    pieces = min(_PIECES, len(ids) // length)
    draft = TrainedDraft(session, min(DRAFTED, session.score_length - 1))
    statistics, tokens = SpeculationStatistics(), 0
    for index in range(pieces):
        progress("measuring the acceptance of the draft head", index, pieces)
        start = index * (len(ids) // pieces)
        prompt = torch.tensor([ids[start : start + length]], device=session.device)
        session.reset()
        sampler = Sampler(Sampling(), prompt, session.vocab_size)
        tokens += sum(1 for _ in generate_speculative(session, prompt, count, sampler, (), draft, statistics))
    session.reset()
    return Acceptance(
        text_tokens=len(ids),
        sha256=hashlib.sha256(torch.tensor(ids).numpy().tobytes()).hexdigest(),
        # The first token of each generation comes from the prompt.
        tokens=tokens - pieces,
        steps=statistics.steps,
        proposed=statistics.proposed_at,
        accepted=statistics.accepted_at,
    )
