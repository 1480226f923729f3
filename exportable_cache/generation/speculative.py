"""Speculative decoding: several tokens proposed cheaply, all of them judged in one step of the model.

Greedy, the tokens are those of plain greedy decoding. Sampled, they follow the model's own distribution exactly,
whatever is proposed: a proposal is accepted with probability min(1, p / q), and after a rejection the token is drawn
from what of p is above q (Leviathan et al. 2023, Chen et al. 2023). Rejected tokens are taken back by length.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from ..errors import InputError
from .loop import Chosen, Ending
from .sampling import Sampler

if TYPE_CHECKING:
    from .loop import PromptStepper, Stepper
    from .sampling import Sampling

#: Any number of many bits: what tells a draft model's random numbers from the model's, under one seed.
_DRAFT_SEED = 0x1D8E4E27C47D124F


@dataclass
class Proposal:
    """Tokens proposed to follow.

    Attributes:
        tokens: Their ids.
        probabilities: [len(tokens), vocab], what each was drawn from; None if each was the only candidate.
    """

    tokens: list[int]
    probabilities: torch.Tensor | None = None


class Draft(Protocol):
    """Proposes tokens."""

    #: Most tokens proposed at once.
    max_tokens: int

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        """Up to `count` tokens that may follow `context`, none if it has no idea.

        Args:
            context: Every token so far, prompt and answer.
            count: Most tokens wanted.
            sampling: How the model's own tokens are chosen.
        """
        ...


@dataclass
class PromptLookup:
    """Proposes what followed the same few tokens earlier in the text (prompt lookup decoding, Saxena 2023).

    Costs nothing, and pays where answers repeat their prompt: summaries, edits, extraction, code.

    Args:
        max_tokens: Most tokens proposed at once.
        ngram: Tokens that must be the same; shorter matches are tried after longer ones, down to one.
    """

    max_tokens: int = 8
    ngram: int = 3

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("ngram", self.ngram)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} of prompt lookup is {value!r}; it must be an int of at least 1")

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        context = list(context)
        for size in range(min(self.ngram, len(context) - 1), 0, -1):
            end = context[-size:]
            # The latest occurrence that has something behind it.
            for start in range(len(context) - size - 1, -1, -1):
                if context[start : start + size] == end:
                    return Proposal(context[start + size : start + size + count])
        return Proposal([])


class DraftModel:
    """Proposes the tokens of a smaller model with the same vocabulary.

    Args:
        session: Of the small model, at batch size 1; it is moved along with the text.
        max_tokens: Most tokens proposed at once.

    Raises:
        InputError: If the session runs several rows.
    """

    def __init__(self, session: PromptStepper, max_tokens: int = 4) -> None:
        if session.batch_size != 1:
            raise InputError(f"a draft model runs at batch size 1, this session has {session.batch_size}")
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise InputError(f"max_tokens of a draft model is {max_tokens!r}; it must be an int of at least 1")
        check_can_rewind(session, max_tokens)
        self.session = session
        self.max_tokens = max_tokens
        self._fed: list[int] = []
        self._sampler: Sampler | None = None
        self._sampling: Sampling | None = None

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        if self._sampler is None or self._sampling is not sampling:
            self._sampling = sampling
            # Random numbers of its own: with those that the model's tokens are drawn from, and proposals judged by,
            # sampled tokens would not follow the model's distribution.
            own = sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed ^ _DRAFT_SEED) % 2**63)
            self._sampler = Sampler(
                own, torch.tensor([context[:1]], device=self.session.device), self.session.vocab_size
            )
        same = next(
            (i for i, (a, b) in enumerate(zip(self._fed, context)) if a != b), min(len(self._fed), len(context) - 1)
        )
        if int(self.session.length[0]) != len(self._fed):
            same = 0  # used elsewhere meanwhile
        # Past what a ring can take back the draft starts over: it may be slow then, never wrong.
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
        tokens, probabilities = [], []
        while True:
            probabilities.append(self._sampler.distribution(logits)[0])
            tokens.append(self._sampler.draw_from(probabilities[-1]))
            if len(tokens) == count:
                return Proposal(tokens, torch.stack(probabilities))
            logits = self.session.decode(torch.tensor(tokens[-1:], device=self.session.device))
            self._fed.append(tokens[-1])


@dataclass
class SpeculationStatistics:
    """What came of the proposals.

    Attributes:
        steps: Steps of the model, each judging one proposal.
        proposed: Tokens proposed.
        accepted: Tokens of these that were given out.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0


def check_can_rewind(session: PromptStepper, tokens: int) -> None:
    """Refuse speculation on a session that could not take back what is rejected.

    Raises:
        InputError: If a layer's state cannot be taken back that far.
    """
    layer, allowed = session.stepper.least_rollback
    if allowed == 0:
        raise InputError(f"{layer} keeps a state that cannot be taken back; decode without a draft")
    if allowed < tokens:
        raise InputError(
            f"speculation takes back up to {tokens} tokens, {layer} at most {allowed}; "
            f"allocate the cache with rollback_slots={tokens - 1}, or propose at most {allowed} at once"
        )


@dataclass
class Speculation:
    """The text so far, who proposes what follows, and what came of it.

    Attributes:
        context: Every token so far, prompt and answer; those given out are added.
        draft: What proposes.
        statistics: Counted here.
    """

    context: list[int]
    draft: Draft
    statistics: SpeculationStatistics = field(default_factory=SpeculationStatistics)


def speculative_loop(
    session: Stepper, logits: torch.Tensor, sampler: Sampler, ending: Ending, speculation: Speculation
) -> Generator[Chosen]:
    """Tokens that follow a prompt which was fed, at batch size 1.

    Between tokens the session's cache may be ahead of what was given out; when the iterator ends, or is closed, it
    holds everything but the newest token, as after plain decoding.

    Args:
        session: What judges; see `Session.score`.
        logits: After the prompt, [1, vocab].
        sampler: How to choose.
        ending: What ends it, but for strings.
        speculation: What proposes, from the prompt on.
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
        accepted = len(tokens) - 1
        statistics.steps += 1
        statistics.proposed += len(proposal.tokens)
        statistics.accepted += accepted
        given_now = 0
        try:
            for token in tokens:
                context.append(token)
                given_now += 1
                yield Chosen(torch.tensor([token]), torch.tensor([False]))
                if token in ending.tokens or given + given_now == limit:
                    break
        finally:
            # Unless the session was moved by someone else while this was waiting, be it to the same length.
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
    """Tokens that follow a prompt, at batch size 1: its prefill, then `speculative_loop`.

    Args:
        session: What judges; see `Session.score`.
        input_ids: int64 [1, length].
        limit: Most tokens; None for as many as the cache has room for.
        chooser: How to choose.
        end_tokens: Any of these is the last token.
        draft: What proposes.
        statistics: Counted here, if given.
    """
    speculation = Speculation(input_ids[0].tolist(), draft, statistics or SpeculationStatistics())

    def begin() -> Generator[Chosen]:
        logits = session.prefill(input_ids)
        return speculative_loop(session.stepper, logits, chooser, Ending(limit, end_tokens), speculation)

    for step in session.stepper.guarded(begin):
        yield int(step.tokens[0])


def _judge(logits: torch.Tensor, proposal: Proposal, sampler: Sampler) -> tuple[list[int], int]:
    """The tokens that follow, and how many of the proposed ones are among them: those, then one of the model's own.

    Args:
        logits: [1 + len(proposal.tokens), vocab], the model's after the token before the proposal and after each in it.
    """
    tokens: list[int] = []
    for index, proposed in enumerate(proposal.tokens):
        probabilities = sampler.distribution(logits[index : index + 1])[0]
        if proposal.probabilities is None:
            drafted = torch.zeros_like(probabilities)
            drafted[proposed] = 1.0
        else:
            drafted = proposal.probabilities[index]
        if not float(sampler.uniform(1)) * float(drafted[proposed]) < float(probabilities[proposed]):
            rest = (probabilities - drafted).clamp(min=0)
            # Nothing is left where the two agree but for rounding: then any token of the model's own distribution is
            # right.
            tokens.append(sampler.draw_from(rest if bool(rest.any()) else probabilities))
            sampler.see(logits.new_tensor(tokens[-1:], dtype=torch.int64))
            return tokens, index
        tokens.append(proposed)
        sampler.see(logits.new_tensor([proposed], dtype=torch.int64))
    tokens.append(int(sampler.choose(logits[-1:])[0]))
    return tokens, len(proposal.tokens)
