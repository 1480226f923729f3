"""Beam search: the rows of a batch are hypotheses, and their caches are reordered with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import InputError
from ..generation.sampling import Sampling

if TYPE_CHECKING:
    from ..session.session import Session


@dataclass(frozen=True)
class Hypothesis:
    """A finished response.

    Attributes:
        tokens: Token ids, including the end token if it has one.
        score: Sum of the tokens' log probabilities, divided by the length to the power of the length penalty.
    """

    tokens: list[int]
    score: float


def beam_search(
    session: Session,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    end_tokens: Collection[int] | None = None,
    length_penalty: float | None = None,
) -> list[Hypothesis]:
    """Return the most probable responses that a beam search finds, one per row of the session, best first.

    Each step keeps the best continuations of all beams that have not ended, and finishes those that have. The search
    stops when there is a finished response per beam (transformers' `early_stopping=True`).

    Args:
        session: A session with one row per beam. It is reset, and holds the last beams afterwards.
        input_ids: The prompt, int64 [1, length].
        max_new_tokens: Most tokens.
        end_tokens: Tokens that end a hypothesis; the model's by default.
        length_penalty: Values above 0 favour longer responses; by default the checkpoint's, or 1.

    Raises:
        InputError: If an argument is wrong, or the runtime does not give out its cache.
        CacheFullError: If the prompt with `max_new_tokens` does not fit.
    """
    from ..session.generate import sampler_after
    from ..session.persistence import runner_state
    from ..session.rows import TokenRows

    runner_state(session)
    beams, vocab = session.batch_size, session.vocab_size
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise InputError("input_ids must be one prompt, int64 [1, length], for beam search")
    if max_new_tokens is None:
        raise InputError("max_new_tokens must be an int of at least 1 for beam search, got None")
    prompt = input_ids.expand(beams, -1).contiguous()
    model_ends = session.check_request(prompt, max_new_tokens, ())
    settings = session.generation_settings
    penalty = settings.length_penalty if length_penalty is None else length_penalty
    sampler = sampler_after(session, Sampling(), TokenRows.whole(prompt), max_new_tokens)
    session.reset()
    logits = session.prefill(prompt)
    # Only one row may continue at first, because all are equal.
    scores = torch.full((beams,), -torch.inf, device=session.device)
    scores[0] = 0.0
    tokens = prompt.new_empty(beams, 0)
    finished: list[Hypothesis] = []
    ends = torch.tensor(
        sorted(model_ends if end_tokens is None else end_tokens), dtype=torch.int64, device=session.device
    )
    for step in range(max_new_tokens):
        # Rules and penalties change the log probabilities, because transformers compares their sums.
        totals = (scores[:, None] + sampler.ruled(logits.float().log_softmax(dim=-1))).flatten()
        # More candidates than beams, because some may end: one per beam and end token.
        best = totals.topk(min(beams * (1 + max(1, len(ends))), totals.shape[0]))
        rows, candidates = best.indices // vocab, best.indices % vocab
        has_ended = torch.isin(candidates, ends)
        for rank in range(beams):
            if bool(has_ended[rank]) and bool(torch.isfinite(best.values[rank])):
                response = [*tokens[rows[rank]].tolist(), int(candidates[rank])]
                finished.append(Hypothesis(response, float(best.values[rank]) / len(response) ** penalty))
        kept = (~has_ended).nonzero()[:beams, 0]
        rows, scores = rows[kept], best.values[kept]
        tokens = torch.cat([tokens[rows], candidates[kept][:, None]], dim=1)
        sampler.reorder(rows)
        sampler.see(tokens[:, -1])
        if len(finished) >= beams or step + 1 == max_new_tokens:
            break
        # Read at each step, because programs with explicit state have other tensors after every step.
        for tensor in runner_state(session).values():
            tensor.copy_(tensor.index_select(0, rows))
        session.stepper.select_rows(rows)
        logits = session.decode_for_generation(tokens[:, -1])
    if len(finished) < beams:
        for row in range(beams):
            finished.append(Hypothesis(tokens[row].tolist(), float(scores[row]) / tokens.shape[1] ** penalty))
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)[:beams]
