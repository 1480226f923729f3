"""Speculative decoding: several tokens are proposed cheaply and verified in one step of the model.

Greedy tokens equal those of plain greedy decoding. Sampled tokens follow the model's distribution exactly, for any
draft: a proposal is accepted with probability min(1, p / q), and after a rejection the token is drawn from the positive
part of p - q (Leviathan et al. 2023, Chen et al. 2023). Rejected tokens are discarded by resetting the length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from ..cache.layer_spec import DRAFTED
from ..errors import InputError
from .host_sampling import NGRAM, look_up
from .loop import Chosen, Ending
from .sampling import Sampler

if TYPE_CHECKING:
    from .sampling import Sampling
    from .stepper import HasStepper, PromptStepper, Stepper

#: Arbitrary constant that separates a draft model's random numbers from the model's under one seed.
_DRAFT_SEED = 0x1D8E4E27C47D124F


@dataclass
class Proposal:
    """Proposed tokens.

    Attributes:
        tokens: Token ids.
        probabilities: [len(tokens), vocab], the distributions they were drawn from; None if each was certain.
    """

    tokens: list[int]
    probabilities: torch.Tensor | None = None


class Draft(Protocol):
    """Interface of a draft, which proposes tokens."""

    #: Most tokens proposed at once.
    max_tokens: int

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        """Propose up to `count` tokens that may follow `context`, possibly none.

        Args:
            context: All tokens so far, of the prompt and the generation.
            count: Most tokens to propose.
            sampling: Settings by which the model's tokens are chosen.
        """
        ...


@dataclass
class PromptLookup:
    """A draft that proposes the tokens that followed the same n-gram earlier in the text (Saxena 2023).

    It needs no second model; each step searches the text once. It helps if the output repeats parts of the prompt:
    summaries, edits, extraction, code.

    Args:
        max_tokens: Most tokens proposed at once.
        ngram: Length of the n-gram in tokens; shorter ones are tried next, down to one.
    """

    max_tokens: int = 8
    ngram: int = NGRAM

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("ngram", self.ngram)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} of prompt lookup must be an int of at least 1, got {value!r}")

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        """Propose tokens, see `Draft.propose`."""
        return Proposal(look_up(context, count, self.ngram))


class _Drawing:
    """Base class of drafts that draw tokens as the model's are drawn, from separate random numbers."""

    def __init__(self, max_tokens: int, what: str) -> None:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise InputError(f"max_tokens of {what} must be an int of at least 1, got {max_tokens!r}")
        self.max_tokens = max_tokens
        self._sampler: Sampler | None = None
        self._sampling: Sampling | None = None

    def _drawn(
        self,
        logits: torch.Tensor,
        following: Callable[[int, int], torch.Tensor],
        context: Sequence[int],
        count: int,
        sampling: Sampling,
    ) -> Proposal:
        """Return proposed tokens.

        Args:
            logits: [1, vocab], those of the first token.
            following: Returns the logits that follow a proposed token, given with the number of tokens proposed so far.
            context: See `Draft.propose`.
            count: Number of tokens, at least 1.
            sampling: See `Draft.propose`.
        """
        if self._sampler is None or self._sampling is not sampling:
            self._sampling = sampling
            # Separate random numbers, because with the model's own ones tokens would not follow its distribution.
            seed = None if sampling.seed is None else (sampling.seed ^ _DRAFT_SEED) % 2**63
            first = torch.tensor([context[:1]], device=logits.device)
            self._sampler = Sampler(replace(sampling, seed=seed), first, logits.shape[-1])
        tokens: list[int] = []
        probabilities: list[torch.Tensor] = []
        while True:
            distribution = self._sampler.distribution(logits)[0]
            # A draft may compute anything, and a token that was not drawn from a distribution cannot be judged.
            if not bool(distribution.isfinite().all()):
                return Proposal(tokens, torch.stack(probabilities) if tokens else None)
            probabilities.append(distribution)
            tokens.append(self._sampler.draw_from(probabilities[-1]))
            if len(tokens) == count:
                return Proposal(tokens, torch.stack(probabilities))
            logits = following(tokens[-1], len(tokens))


class TrainedDraft(_Drawing):
    """A draft that proposes the tokens of the draft head which the session's own program has.

    Args:
        session: The session that generates, such as `Session.from_model(model, draft="mtp")`.
        max_tokens: Most tokens proposed at once. A head is trained for few of them.

    Raises:
        InputError: If the program has no draft head, or `max_tokens` is out of range.
    """

    def __init__(self, session: HasStepper, max_tokens: int = DRAFTED) -> None:
        super().__init__(max_tokens, "a trained draft")
        most = session.stepper.most_drafted
        if most == 0:
            raise InputError(
                "session must have a draft head, got one without; open it with Session.from_model(model, draft='mtp')"
            )
        if max_tokens > most:
            raise InputError(f"max_tokens of a trained draft must be at most {most}, got {max_tokens}; lower it")
        self.session = session

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        """Propose tokens, see `Draft.propose`. All of `context` but the newest token is in the session."""
        step = self.session.stepper.draft
        return self._drawn(step(context[-1], 0), step, context, count, sampling)


class DraftModel(_Drawing):
    """A draft that proposes the tokens of a smaller model with the same vocabulary.

    Args:
        session: Session of the small model with batch size 1; it follows the text.
        max_tokens: Most tokens proposed at once.

    Raises:
        InputError: If the batch size is not 1, or the session cannot discard `max_tokens` tokens.
    """

    def __init__(self, session: PromptStepper, max_tokens: int = 4) -> None:
        if session.batch_size != 1:
            raise InputError(f"batch_size of a draft model must be 1, got {session.batch_size}; open another session")
        super().__init__(max_tokens, "a draft model")
        check_can_rewind(session, max_tokens)
        self.session = session
        self._fed: list[int] = []

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        """Propose tokens, see `Draft.propose`."""
        same = next(
            (i for i, (a, b) in enumerate(zip(self._fed, context)) if a != b), min(len(self._fed), len(context) - 1)
        )
        if int(self.session.length[0]) != len(self._fed):
            same = 0  # the session was used by another caller
        # If a ring buffer cannot discard that many tokens, the draft starts again, which is slow but correct.
        try:
            self.session.rewind(len(self._fed) - same)
        except InputError:
            self.session.reset()
            same = 0
        room = self.session.max_length
        if room is not None:
            count = min(count, room - len(context) + 1)
        if count < 1:
            self._fed = self._fed[:same]
            return Proposal([])
        logits = self.session.prefill(torch.tensor([context[same:]], device=self.session.device))
        self._fed = list(context)

        def following(token: int, proposed: int) -> torch.Tensor:
            self._fed.append(token)
            return self.session.decode(torch.tensor([token], device=self.session.device))

        return self._drawn(logits, following, context, count, sampling)


@dataclass
class SpeculationStatistics:
    """Counts of a speculative generation.

    Attributes:
        steps: Steps of the model, one per proposal.
        proposed: Proposed tokens.
        accepted: Proposed tokens that were accepted.
        proposed_at: Proposed tokens by their position in a proposal.
        accepted_at: Accepted tokens by their position in a proposal.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, proposed: int, accepted: int) -> None:
        """Count one step of the model."""
        self.steps += 1
        self.proposed += proposed
        self.accepted += accepted
        for counts in (self.proposed_at, self.accepted_at):
            counts.extend([0] * (proposed - len(counts)))
        for index in range(proposed):
            self.proposed_at[index] += 1
            self.accepted_at[index] += index < accepted


def check_can_rewind(session: HasStepper, tokens: int) -> None:
    """Check that a session can discard `tokens` rejected tokens.

    Raises:
        InputError: If a layer cannot.
    """
    layer, allowed = session.stepper.least_rollback
    if allowed == 0:
        raise InputError(f"speculation must discard tokens, but the state of {layer} cannot; decode without a draft")
    if allowed < tokens:
        raise InputError(
            f"speculation must discard up to {tokens} tokens, but {layer} takes back at most {allowed}; allocate the "
            f"cache with rollback_slots={tokens - 1}, or propose at most {allowed} at once"
        )


@dataclass
class Speculation:
    """State of a speculative generation.

    Attributes:
        context: All tokens so far, of the prompt and the generation; extended with each yielded token.
        draft: The draft.
        statistics: Counts, updated with each step.
    """

    context: list[int]
    draft: Draft
    statistics: SpeculationStatistics = field(default_factory=SpeculationStatistics)


def speculative_loop(
    session: Stepper, logits: torch.Tensor, sampler: Sampler, ending: Ending, speculation: Speculation
) -> Generator[Chosen]:
    """Yield the tokens that follow a prompt which was already fed, at batch size 1.

    Between tokens the session's cache may be ahead of the yielded tokens. When the iterator ends or is closed, it holds
    everything except the newest token, as after plain decoding.

    Args:
        session: The session that verifies proposals, see `Session.score`.
        logits: [1, vocab] after the prompt.
        sampler: Chooses the tokens.
        ending: The conditions that end it; strings are ignored.
        speculation: The prompt, the draft and the counts.
    """
    context, draft, statistics = speculation.context, speculation.draft, speculation.statistics
    limit = ending.limit
    token = int(sampler.choose(logits)[0])
    context.append(token)
    yield Chosen(torch.tensor([token]), torch.tensor([False]))
    given = 1
    while token not in ending.tokens and given != limit and (room := session.room) != 0:
        equal = session.equal_steps()
        count = min(
            draft.max_tokens,
            session.score_length - 1,
            equal - 1,
            draft.max_tokens if limit is None else limit - given - 1,
            draft.max_tokens if room is None else room - 1,
        )
        proposal = draft.propose(context, count, sampler.sampling) if count > 0 else Proposal([])
        fed_tokens = torch.tensor([[token, *proposal.tokens]], device=session.device)
        logits = session.decode_for_generation(fed_tokens[0]) if equal == 0 else session.score(fed_tokens)[0]
        fed, moves = int(session.length[0]), session.moves
        tokens = sampler.agreed(_judge(logits, proposal, sampler)[0], len(proposal.tokens) + 1)
        statistics.add(len(proposal.tokens), len(tokens) - 1)
        given_now = 0
        try:
            for token in tokens:
                context.append(token)
                given_now += 1
                yield Chosen(torch.tensor([token]), torch.tensor([False]))
                if token in ending.tokens or given + given_now == limit:
                    break
        finally:
            # Unless another caller has used the session since, even if it has the same length.
            if session.moves == moves and int(session.length[0]) == fed:
                session.shift(given_now - len(proposal.tokens) - 1)
        given += given_now


def generate_speculative(
    session: PromptStepper,
    input_ids: torch.Tensor,
    limit: int | None,
    chooser: Sampler,
    end_tokens: Collection[int],
    draft: Draft,
    statistics: SpeculationStatistics | None = None,
) -> Iterator[int]:
    """Prefill a prompt and yield the tokens that follow, see `speculative_loop`.

    Args:
        session: The session that verifies proposals, with batch size 1.
        input_ids: int64 [1, length].
        limit: Most tokens; None for the room in the cache.
        chooser: Chooses the tokens.
        end_tokens: Tokens that end the generation.
        draft: The draft.
        statistics: Counts to update, if given.
    """
    speculation = Speculation(input_ids[0].tolist(), draft, statistics or SpeculationStatistics())

    def begin() -> Generator[Chosen]:
        logits = session.prefill(input_ids)
        return speculative_loop(session.stepper, logits, chooser, Ending(limit, end_tokens), speculation)

    for step in session.stepper.guarded(begin):
        yield int(step.tokens[0])


def _judge(logits: torch.Tensor, proposal: Proposal, sampler: Sampler) -> tuple[list[int], int]:
    """Return the accepted tokens followed by one of the model's, and the number of accepted ones.

    Args:
        logits: [1 + len(proposal.tokens), vocab], after the token before the proposal and after each token in it.
        proposal: The proposed tokens.
        sampler: Chooses the tokens.
    """
    tokens: list[int] = []
    for index, proposed in enumerate(proposal.tokens):
        probabilities = sampler.distribution(logits[index : index + 1])[0]
        if proposal.probabilities is None:
            drafted = torch.zeros_like(probabilities)
            drafted[proposed] = 1.0
        else:
            drafted = proposal.probabilities[index]
        share = float(drafted[proposed])
        # False for NaN, too.
        is_accepted = float(sampler.uniform(1)) * share < float(probabilities[proposed]) and share > 0
        if not is_accepted:
            rest = (probabilities - drafted).clamp(min=0)
            # If the distributions differ only by rounding, nothing is left, and any token of the model's is right.
            is_usable = bool(rest.any()) and bool(rest.isfinite().all())
            tokens.append(sampler.draw_from(rest if is_usable else probabilities))
            sampler.see(logits.new_tensor(tokens[-1:], dtype=torch.int64))
            return tokens, index
        tokens.append(proposed)
        sampler.see(logits.new_tensor([proposed], dtype=torch.int64))
    tokens.append(int(sampler.choose(logits[-1:])[0]))
    return tokens, len(proposal.tokens)
