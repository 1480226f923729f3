"""Speculative decoding: greedy, the tokens of plain decoding; sampled, the model's own distribution."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import (
    DraftModel,
    PromptLookup,
    Proposal,
    Sampler,
    Sampling,
    SpeculationStatistics,
    generate_speculative,
)
from exportable_cache.errors import InputError
from exportable_cache.generation.speculative import _judge

from ..support.models import among, hybrid_model, tiny_model, tokens
from ..support.sessions import lowered_session

SLACK = 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("gemma3_text")


def session_of(
    model: Any, slack: int = SLACK, score_length: int = 6, length: int = 96, compile: bool = False
) -> Session:
    cache = ExportableCache.from_model(model, length, rollback_slots=slack)
    return Session.from_model(model, cache, prefill_chunk=16, score_length=score_length, compile=compile)


class Scripted:
    """Proposes the tokens that plain decoding gives, wrong at every `wrong`-th."""

    def __init__(self, prompt: int, answer: Sequence[int], wrong: int, max_tokens: int = 5) -> None:
        self.prompt, self.answer, self.wrong, self.max_tokens = prompt, list(answer), wrong, max_tokens

    def propose(self, context: Sequence[int], count: int, sampling: Sampling) -> Proposal:
        done = len(context) - self.prompt
        proposed = self.answer[done : done + count]
        return Proposal([token if (done + i) % self.wrong else (token + 1) % 128 for i, token in enumerate(proposed)])


def plain(model: Any, prompt: torch.Tensor, count: int | None) -> list[int]:
    return list(session_of(model).generate(prompt, count))


def test_a_session_with_a_cache_of_its_own_takes_drafts() -> None:
    """Rings, too: nothing is planned for them."""
    model = tiny_model("gemma3_text")
    ids = tokens(30)
    session = Session.from_model(model, max_cache_len=64)
    assert session.max_length == 64 and session.score_length == 9
    drafted = list(session.generate(ids, 20, draft=PromptLookup(max_tokens=8)))
    session.reset()
    assert drafted == list(session.generate(ids, 20))
    with pytest.raises(InputError, match="max_cache_len must be left out with a cache, got 8"):
        Session.from_model(model, session.cache, max_cache_len=8)
    assert Session.from_model(model, max_cache_len=8).score_length == 8
    assert Session.from_model(tiny_model("mamba"), max_cache_len=8).score_length == 0


@pytest.mark.parametrize("wrong", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("length", [3, 8, 20])
def test_greedy_tokens_are_those_of_plain_decoding(model: Any, length: int, wrong: int) -> None:
    prompt = tokens(length, seed=length)
    expected = plain(model, prompt, 50)
    session = session_of(model)
    assert list(session.generate(prompt, 50, draft=Scripted(length, expected, wrong))) == expected
    assert session.length.tolist() == [length + 49]


def test_proposals_are_judged_together(model: Any) -> None:
    """Five right tokens a time and one of the model's own: 49 tokens after the first in nine steps."""
    prompt = tokens(8)
    expected = plain(model, prompt, 50)
    session, statistics = session_of(model), SpeculationStatistics()
    chooser = Sampler(Sampling(), prompt, session.vocab_size)
    draft = Scripted(8, expected, 1000)
    assert list(generate_speculative(session, prompt, 50, chooser, (), draft, statistics)) == expected
    assert statistics.steps == 9
    assert statistics.accepted == statistics.proposed == 49 - 9


def test_it_fills_the_cache_as_plain_decoding_does(model: Any) -> None:
    prompt = tokens(20)
    expected = plain(model, prompt, None)
    assert len(expected) == 96 - 20 + 1
    session = session_of(model)
    assert list(session.generate(prompt, draft=Scripted(20, expected, 4))) == expected
    assert session.room == 0


@pytest.mark.parametrize("taken", [1, 2, 4, 7])
def test_stopping_anywhere_leaves_all_but_the_newest_token_in_the_cache(model: Any, taken: int) -> None:
    prompt = tokens(12)
    expected = plain(model, prompt, 30)
    session = session_of(model)
    steps = session.generate(prompt, 30, draft=Scripted(12, expected, 1000))
    assert [next(steps) for _ in range(taken)] == expected[:taken]
    steps.close()
    del steps
    assert session.length.tolist() == [12 + taken - 1]
    assert list(session.generate(torch.tensor([expected[taken - 1 : taken]]), 5)) == expected[taken : taken + 5]


def test_closing_an_old_generator_leaves_what_the_session_holds_by_then(model: Any) -> None:
    """A reset and a prompt as long as what the generator had fed: only the count of moves tells the two apart."""
    prompt, other = tokens(4), tokens(10, seed=1)
    session = session_of(model)
    steps = session.generate(prompt, 30, draft=Scripted(4, plain(model, prompt, 30), 1000, max_tokens=4))
    next(steps), next(steps)
    assert session.length.tolist() == [9]
    session.reset()
    session.prefill(other[:, :9])
    steps.close()
    assert session.length.tolist() == [9]
    assert torch.allclose(session.decode(other[0, 9:]), session_of(model).prefill(other), atol=1e-5)


def test_closing_a_generator_during_a_step_leaves_that_step_alone(model: Any) -> None:
    """As when it is collected by then: lengths are those that it left."""
    prompt = tokens(4)
    session = session_of(model)
    steps = session.generate(prompt, 30, draft=Scripted(4, plain(model, prompt, 30), 1000, max_tokens=4))
    next(steps), next(steps)
    run = session.runner.run

    def closing(*arguments: Any) -> torch.Tensor:
        steps.close()
        return run(*arguments)

    session.runner.run = closing
    session.decode(torch.tensor([1]))
    assert session.length.tolist() == [10]


def test_an_end_token_among_the_accepted_ends(model: Any) -> None:
    prompt = tokens(12)
    expected = plain(model, prompt, 30)
    end = expected[3]
    upto = expected.index(end) + 1
    session = session_of(model)
    assert list(session.generate(prompt, 30, stop=end, draft=Scripted(12, expected, 1000))) == expected[:upto]
    assert session.length.tolist() == [12 + upto - 1]


def test_prompt_lookup_proposes_what_followed_last_time() -> None:
    lookup = PromptLookup(max_tokens=3, ngram=2)
    assert lookup.propose([1, 2, 3, 4, 9, 1, 2], 3, Sampling()).tokens == [3, 4, 9]
    assert lookup.propose([1, 2, 3, 7, 1, 2, 5, 6, 1, 2], 2, Sampling()).tokens == [5, 6]
    assert lookup.propose([1, 2, 8, 2], 3, Sampling()).tokens == [8, 2]
    assert lookup.propose([1, 2, 3], 3, Sampling()).tokens == []
    assert lookup.propose([1], 3, Sampling()).tokens == []


def test_prompt_lookup_on_a_model_that_repeats_itself(model: Any) -> None:
    prompt = tokens(6, seed=1)
    expected = plain(model, prompt, 60)
    session, statistics = session_of(model), SpeculationStatistics()
    chooser = Sampler(Sampling(), prompt, session.vocab_size)
    assert list(generate_speculative(session, prompt, 60, chooser, (), PromptLookup(5), statistics)) == expected
    assert statistics.accepted > 0


def test_a_draft_model_with_the_same_weights_is_always_right(model: Any) -> None:
    prompt = tokens(9)
    expected = plain(model, prompt, 40)
    session, statistics = session_of(model), SpeculationStatistics()
    chooser = Sampler(Sampling(), prompt, session.vocab_size)
    draft = DraftModel(session_of(model), 4)
    assert list(generate_speculative(session, prompt, 40, chooser, (), draft, statistics)) == expected
    assert statistics.accepted == statistics.proposed > 25


def test_a_draft_model_with_other_weights_changes_nothing(model: Any) -> None:
    prompt = tokens(9)
    other = tiny_model("llama")
    draft = DraftModel(session_of(other), 4)
    session = session_of(model)
    assert list(session.generate(prompt, 40, draft=draft)) == plain(model, prompt, 40)


# A model's proposals under seeds take the same way, with other random numbers.
@pytest.mark.parametrize("kind", among(["lookup", "model", "model under seeds"], fast=["lookup"]))
def test_sampled_tokens_follow_the_distribution_of_the_model(kind: str) -> None:
    """Pairs of tokens after a fixed prompt, counted against their exact probabilities."""
    model = tiny_model("llama", vocab_size=8)
    model.generation_config.eos_token_id = None
    # Lookup proposes something after any first token, which is taken for a quarter of them.
    prompt = torch.tensor([[0, 7, 4, 2, 1, 6, 3, 5, 0]])
    sampling = {"temperature": 1.2, "top_k": 5}
    session = session_of(model, slack=0, score_length=4, length=16)
    exact: dict[tuple[int, int], float] = {}
    chooser = Sampler(Sampling(**sampling), prompt, 8)
    first = chooser.distribution(session.prefill(prompt))[0]
    for token in first.nonzero()[:, 0].tolist():
        second = chooser.distribution(session.decode(torch.tensor([token])))[0]
        session.rewind(1)
        exact.update({(token, after): float(first[token] * second[after]) for after in second.nonzero()[:, 0].tolist()})
    draft = (
        PromptLookup(3) if kind == "lookup" else DraftModel(session_of(tiny_model("qwen3", vocab_size=8), 0, 0, 16), 3)
    )
    count, counted = 600, Counter()
    torch.manual_seed(0)
    for index in range(count):
        session.reset()
        seed = index if kind == "model under seeds" else None
        counted[tuple(session.generate(prompt, 3, seed=seed, draft=draft, **sampling))[:2]] += 1
    assert set(counted) <= set(exact)
    distance = sum(abs(counted[pair] / count - probability) for pair, probability in exact.items()) / 2
    # 0.16 and more where what follows a rejection is drawn from all of the distribution.
    assert distance < 0.1


def test_exported_programs_judge_too() -> None:
    # A ring alone, which also has to take tokens back.
    model = hybrid_model(eos_token_id=None, num_hidden_layers=1, layer_types=["sliding_attention"])
    prompt = tokens(9)
    model.generation_config.eos_token_id = None
    expected = plain(model, prompt, 20)
    draft = Scripted(9, expected, 3, max_tokens=1)
    session = lowered_session(model, "pt2", 96, score_length=6)
    assert list(session.generate(prompt, 20, draft=draft)) == expected


# In the fast lane a pt2 program, above: lowering takes longest.
@pytest.mark.full
@pytest.mark.parametrize("methods", ["forward", "split"])
def test_executorch_programs_judge_too(methods: str) -> None:
    """`forward` gives the logits of the last few tokens, and is the only method; split, there is one for it."""
    model = tiny_model("llama")
    length = 40  # more than a chunk
    prompt = torch.cat([tokens(8, seed=1)] * (length // 8), dim=1)
    expected = list(Session.from_model(model, ExportableCache.from_model(model, 96)).generate(prompt, 30))
    session = lowered_session(model, "executorch", 96, score_length=6, prefill_chunk=16, methods=methods)
    statistics = SpeculationStatistics()
    chooser = Sampler(Sampling(), prompt, session.vocab_size)
    draft = Scripted(length, expected, 4)
    assert list(generate_speculative(session, prompt, 30, chooser, (), draft, statistics)) == expected
    assert statistics.accepted > 15
    session.reset()
    # Lengths of one token, of fewer and of more than are scored.
    logits = Session.from_model(model, ExportableCache.from_model(model, 96)).prefill(prompt)
    for size in (1, 3, 6, 16):
        session.reset()
        session.prefill(prompt[:, :-size])
        assert (session.prefill(prompt[:, -size:]) - logits).abs().max() <= 1e-4
    with pytest.raises(InputError, match="score takes up to 6 tokens at once, got 7"):
        session.score(tokens(7))


def test_what_cannot_work_is_refused_before_a_step(model: Any) -> None:
    prompt = tokens(4)
    draft = PromptLookup(6)
    with pytest.raises(
        InputError,
        match="discard up to 6 tokens, but layer 0 .ring. takes back at most 3; .*=5, or propose at most 3",
    ):
        session_of(model, slack=2, score_length=8).generate(prompt, draft=draft)
    with pytest.raises(InputError, match="score_length=7"):
        session_of(model, score_length=0).generate(prompt, draft=draft)
    with pytest.raises(InputError, match="stop must be token ids with a draft"):
        session = session_of(model)
        session.tokenizer = object()
        session.generate(prompt, stop="x", draft=PromptLookup(2))
    for wrong in ({"max_tokens": 0}, {"ngram": 1.5}):
        with pytest.raises(InputError, match="of prompt lookup must be"):
            PromptLookup(**wrong)
    with pytest.raises(InputError, match="the vocabulary of this model, 128 tokens, got 64"):
        other = DraftModel(session_of(tiny_model("llama", vocab_size=64)), 2)
        session_of(model).generate(prompt, draft=other)
    with pytest.raises(InputError, match="score takes up to 6 tokens at once, got 7"):
        session_of(model).score(tokens(7))
    with pytest.raises(InputError, match="logits of the last token only"):
        session_of(model, score_length=0).score(prompt)


def test_a_rejection_that_leaves_nothing_draws_from_the_model() -> None:
    """The draft's distribution may be the model's but for rounding, and a little above it everywhere."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 9.0]])
    chooser = Sampler(Sampling(temperature=1.0, seed=0), torch.tensor([[1]]), 4)
    drafted = chooser.distribution(logits[:1]) * (1 + 1e-6)
    # As close to one as a random number comes: what is drawn for the rejection, and then for the token.
    chooser.uniform = lambda rows, steps=1: torch.full((steps, rows), 1 - 2.0**-24)
    assert _judge(logits, Proposal([0], drafted), chooser) == ([3], 0)
