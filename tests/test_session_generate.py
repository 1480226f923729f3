"""Generating with sessions: what ends it, what it continues, and text."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import TextStream
from exportable_cache.errors import CacheFullError, InputError

from .decoding.byte_tokenizer import END, SIZE, byte_tokenizer
from .support.kinds import KINDS, kind_model
from .support.models import FAMILIES, among, hybrid_model, tiny_model, tokens
from .support.oracle import reference_logits

CAPACITY = 64


@pytest.fixture(scope="module")
def model() -> Any:
    return hybrid_model()


def session_of(model: Any, batch_size: int = 1, **options: Any) -> Session:
    return Session.from_model(
        model, ExportableCache.from_model(model, CAPACITY, batch_size), prefill_chunk=13, **options
    )


# -- generate
# -----------------------------------------------------------------------------------------------------------


def greedy(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """What the eager model says, whole sequence anew for every token."""
    for _ in range(count):
        ids = torch.cat([ids, reference_logits(model, ids, ids.shape[1])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, -count:].tolist()


def without_end(session: Session) -> Session:
    session.generation_config = GenerationConfig()
    return session


def test_greedy_tokens_are_the_models(model: Any) -> None:
    ids = tokens(5)
    session = without_end(session_of(model))
    generated = list(session.generate(ids, 20))
    assert generated == greedy(model, ids, 20)
    assert all(type(token) is int for token in generated)
    assert session.length.tolist() == [5 + 19]


@pytest.mark.parametrize("family", [*FAMILIES, "hybrid", *among(KINDS, fast=["gemma3n_text", "lfm2", "mamba"])])
def test_tokens_of_tiny_models_depend_on_the_cache(family: str) -> None:
    """Tests that compare tokens see lost keys and values only with such models."""
    make = {"hybrid": lambda _: hybrid_model(), **dict.fromkeys(KINDS, kind_model)}.get(family, tiny_model)
    session = without_end(session_of(make(family)))
    for seed in range(2):
        session.reset()
        prompt = tokens(20, seed=seed)
        first, *expected = session.generate(prompt, 10)
        session.reset()
        session.prefill(prompt)
        for tensor in session.cache.stored_state().values():
            tensor.zero_()
        assert sum(map(operator.ne, session.generate(torch.tensor([[first]]), 9), expected)) >= 4


def test_generate_continues_with_the_newest_token(model: Any) -> None:
    ids = tokens(5)
    session = without_end(session_of(model))
    first = list(session.generate(ids, 4))
    more = list(session.generate(torch.tensor([first[-1:]]), 4))
    assert first + more == greedy(model, ids, 8)


def test_without_limit_it_stops_when_the_cache_is_full(model: Any) -> None:
    session = without_end(session_of(model))
    assert len(list(session.generate(tokens(50)))) == CAPACITY - 50 + 1
    assert session.length.tolist() == [CAPACITY]
    session.reset()
    # The most that may be asked for is just that.
    assert len(list(session.generate(tokens(50), CAPACITY - 50 + 1))) == CAPACITY - 50 + 1
    session.reset()
    assert len(list(session.generate(tokens(CAPACITY), 1))) == 1


def test_end_tokens_of_the_model_end_it(model: Any) -> None:
    session = without_end(session_of(model))
    free = list(session.generate(tokens(5, seed=4), 12, temperature=1.0, seed=0))
    session.generation_config = GenerationConfig(eos_token_id=[free[7], 1])
    session.reset()
    count = 1 + min(free.index(end) for end in (free[7], 1) if end in free)
    assert list(session.generate(tokens(5, seed=4), 12, temperature=1.0, seed=0)) == free[:count]


def test_stop_tokens_end_it(model: Any) -> None:
    session = without_end(session_of(model))
    free = list(session.generate(tokens(5), 12, temperature=1.0, seed=0))
    for stop in (free[5], [free[5]], (free[5], free[6])):
        session.reset()
        ended = list(session.generate(tokens(5), 12, temperature=1.0, seed=0, stop=stop))
        assert ended == free[: free.index(free[5]) + 1]


def test_seed_repeats(model: Any) -> None:
    def generated(seed: int) -> list[int]:
        return list(
            without_end(session_of(model)).generate(tokens(5), 10, temperature=2.0, top_k=50, top_p=0.95, seed=seed)
        )

    assert generated(1) == generated(1)
    assert generated(1) != generated(2)


def test_batches_give_tensors(model: Any) -> None:
    ids = tokens(5, batch_size=2)
    session = without_end(session_of(model, batch_size=2))
    steps = list(session.generate(ids, 6))
    assert [step.shape for step in steps] == [(2,)] * 6
    rows = torch.stack(steps, dim=1).tolist()
    assert rows == [greedy(model, ids[:1], 6), greedy(model, ids[1:], 6)]


# -- text
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_model() -> Any:
    """Speaks bytes, and as a random model mostly invalid ones."""
    return tiny_model("llama", vocab_size=SIZE, eos_token_id=SIZE - 1)


def text_session(model: Any, chat: bool = False, **options: Any) -> Session:
    return session_of(model, tokenizer=byte_tokenizer(chat), **options)


def test_text_is_the_decoded_tokens(byte_model: Any) -> None:
    session = text_session(byte_model)
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 0}
    pieces = list(session.stream_text("hello é", **options))
    session.reset()
    ids = torch.tensor([session.tokenizer("hello é")["input_ids"]])
    generated = list(session.generate(ids, **options))
    assert len(generated) == 30
    assert "".join(pieces) == session.tokenizer.decode(generated, skip_special_tokens=True)
    assert len(pieces) > 1
    session.reset()
    assert session.generate_text("hello é", **options) == "".join(pieces)


def test_stop_string_is_not_given_out(byte_model: Any) -> None:
    session = text_session(byte_model)
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 0}
    whole = "".join(session.stream_text("hello", **options))
    stop = whole[10:12]
    session.reset()
    assert "".join(session.stream_text("hello", **options, stop=stop)) == whole[: whole.index(stop)]
    session.reset()
    ids = torch.tensor([session.tokenizer("hello")["input_ids"]])
    generated = list(session.generate(ids, **options, stop=stop))
    assert stop in session.tokenizer.decode(generated)
    assert stop not in session.tokenizer.decode(generated[:-1])


def test_end_and_stop_tokens_are_not_given_out(byte_model: Any) -> None:
    session = text_session(byte_model)
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 0}
    ids = torch.tensor([session.tokenizer("hello")["input_ids"]])
    generated = list(session.generate(ids, **options))
    session.reset()
    before = session.tokenizer.decode(generated[: generated.index(generated[12])])
    assert "".join(session.stream_text("hello", **options, stop=generated[12])) == before


def test_text_continues_and_chat_starts_anew(byte_model: Any) -> None:
    session = text_session(byte_model, chat=True)
    list(session.stream_text("one", 3))
    assert session.length.tolist() == [3 + 2]
    list(session.stream_text("two", 3))
    # The third token of the first turn goes in front.
    assert session.length.tolist() == [5 + 1 + 3 + 2]
    messages = [{"role": "user", "content": "hi"}]
    answer = "".join(session.stream_text(messages, 5))
    assert session.length.tolist() == [len("[user]hi>") + 4]
    session.reset()
    assert "".join(session.stream_text("[user]hi>", 5)) == answer


def encoded(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


def noted(session: Session) -> list[list[int]]:
    """Token ids of every step from now on, filled as they run."""
    fed: list[list[int]] = []
    run, run_and_choose = session.runner.run, session.runner.run_and_choose

    def note(method: str, input_ids: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        fed.append(input_ids[0].tolist())
        return run(method, input_ids, input_pos)

    def note_choice(
        method: str, chooser: Any, input_ids: torch.Tensor, input_pos: torch.Tensor, steps: int
    ) -> torch.Tensor:
        fed.append(input_ids[0].tolist())
        return run_and_choose(method, chooser, input_ids, input_pos, steps=steps)

    session.runner.run, session.runner.run_and_choose = note, note_choice
    return fed


FREE = {"temperature": 1.0, "seed": 0}


def test_continued_text_sees_every_token(byte_model: Any) -> None:
    session = without_end(text_session(byte_model))
    fed = noted(session)
    list(session.stream_text("one", 4, **FREE))
    assert len(fed) == 1 + 3
    newest = session.unfed[0]
    list(session.stream_text("two", 1))
    assert sum(fed, []) == [*encoded("one"), *(fed[1] + fed[2] + fed[3]), newest, *encoded("two")]
    last = session.unfed[0]
    logits = session.decode(torch.tensor([last]))
    whole = torch.tensor([sum(fed, [])])
    assert whole.tolist()[0][-1] == last
    assert (logits - reference_logits(byte_model, whole, whole.shape[1])[:, -1]).abs().max() < 1e-4
    # Nothing dropped: the same tokens come from ids that the caller put together.
    other = without_end(session_of(byte_model))
    first = list(other.generate(torch.tensor([encoded("one")]), 4, **FREE))
    assert first[-1] == newest
    assert list(other.generate(torch.tensor([[newest, *encoded("two")]]), 1)) == [last]


def test_text_that_failed_gives_up_its_turn_even_while_its_error_is_kept(
    byte_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = without_end(text_session(byte_model))

    def failing(*arguments: Any, **options: Any) -> str:
        raise RuntimeError("of the tokenizer")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="of the tokenizer") as kept:
        patched.setattr(TextStream, "push", failing)
        list(session.stream_text("one", 3))
    list(session.stream_text("two", 3))
    assert kept.value.__traceback__ is not None


def test_text_in_turns_is_the_text_at_once(byte_model: Any) -> None:
    session = without_end(text_session(byte_model))
    fed = noted(session)
    list(session.stream_text("hello", 12))
    at_once = sum(fed, [])
    session.reset()
    fed.clear()
    list(session.stream_text("hello", 5))
    list(session.stream_text("", 7))
    assert sum(fed, []) == at_once


def test_text_after_generated_ids_and_after_an_abandoned_text(byte_model: Any) -> None:
    session = without_end(text_session(byte_model))
    generated = list(session.generate(torch.tensor([[70, 71]]), 3, **FREE))
    fed = noted(session)
    pieces = session.stream_text("a", 9, **FREE)
    next(pieces)
    assert fed[0] == [generated[-1], *encoded("a")]
    pieces.close()
    newest = session.unfed[0]
    assert newest is not None
    list(session.stream_text("b", 1))
    assert fed[-1] == [newest, *encoded("b")]


@pytest.mark.parametrize("ends", ["model", "stop"])
def test_end_token_is_not_fed_to_continued_text(byte_model: Any, ends: str) -> None:
    session = without_end(text_session(byte_model))
    first = next(session.generate(torch.tensor([encoded("one")]), 1))
    session.reset()
    if ends == "model":
        session.generation_config = GenerationConfig(eos_token_id=first)
    assert "".join(session.stream_text("one", 5, stop=first if ends == "stop" else None)) == ""
    fed = noted(session)
    list(session.stream_text("two", 1))
    assert fed == [encoded("two")]


@pytest.mark.parametrize(
    "between",
    [
        lambda session: session.reset(),
        lambda session: session.rewind(0),
        lambda session: session.rewind(2),
        lambda session: session.decode(torch.tensor([70])),
        lambda session: session.prefill(torch.tensor([[70, 71]])),
        lambda session: list(session.generate(torch.tensor([[70, 71]]), 1, stop=list(range(SIZE)))),
    ],
    ids=["reset", "rewind nothing", "rewind", "decode", "prefill", "generate"],
)
@pytest.mark.parametrize("asked_before", [False, True])
def test_what_comes_between_drops_the_newest_token(byte_model: Any, between: Any, asked_before: bool) -> None:
    session = without_end(text_session(byte_model))
    list(session.stream_text("one", 3))
    pieces = session.stream_text("two", 1) if asked_before else None
    between(session)
    fed = noted(session)
    list(session.stream_text("two", 1) if pieces is None else pieces)
    assert fed == [encoded("two")]


def test_refused_calls_keep_the_newest_token(byte_model: Any) -> None:
    session = without_end(text_session(byte_model))
    list(session.stream_text("one", 3))
    newest = session.unfed[0]
    for refused in (
        lambda: session.rewind(60),
        lambda: session.prefill(torch.tensor([[SIZE]])),
        lambda: session.stream_text("x" * 100),
        lambda: session.stream_text("x", 0),
    ):
        with pytest.raises((InputError, CacheFullError)):
            refused()
    fed = noted(session)
    list(session.stream_text("two", 1))
    assert fed == [[newest, *encoded("two")]]


def test_newest_token_takes_room(byte_model: Any) -> None:
    session = without_end(text_session(byte_model))
    list(session.stream_text("one", 3))
    room = CAPACITY - 5
    with pytest.raises(CacheFullError, match=f"holds 5 of at most 64 tokens, {room + 1} more do not fit"):
        session.stream_text("x" * room)
    with pytest.raises(CacheFullError, match=f"after a prompt of {room} tokens max_new_tokens may be at most 1, got 2"):
        session.stream_text("x" * (room - 1), 2)
    assert session.length.tolist() == [5]
    list(session.stream_text("x" * (room - 1), 1))
    assert session.length.tolist() == [CAPACITY]


def test_refused_chat_does_not_reset(byte_model: Any) -> None:
    session = text_session(byte_model, chat=True)
    session.prefill(torch.tensor([[70, 71]]))
    with pytest.raises(CacheFullError, match="holds 0 of at most 64 tokens, 107 more do not fit; shorten the prompt"):
        session.stream_text([{"role": "user", "content": "x" * 100}])
    assert session.length.tolist() == [2]


def test_text_refusals(byte_model: Any) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        text_session(byte_model).stream_text("")
    with pytest.raises(InputError, match="prompt must be a list of 2 prompts"):
        text_session(byte_model, batch_size=2).stream_text("hi")
    with pytest.raises(InputError, match="no chat template"):
        text_session(byte_model).stream_text([{"role": "user", "content": "hi"}])


def test_end_token_gives_no_text(byte_model: Any) -> None:
    # The model's end token ends the text even where the tokenizer would print it.
    session = text_session(byte_model)
    free = list(session.generate(torch.tensor([[70, 71]]), 6, temperature=1.0, seed=5))
    session.generation_config = GenerationConfig(eos_token_id=free[3])
    session.reset()
    prompt = session.tokenizer.decode([70, 71])
    expected = session.tokenizer.decode(free[: free.index(free[3])])
    assert "".join(session.stream_text(prompt, 6, temperature=1.0, seed=5)) == expected
    assert END not in expected


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"do_sample": True}, "do_sample is not an argument of sessions, got True; temperature above 0 samples"),
        ({"num_beams": 4}, "beam_search"),
        ({"max_length": 9}, "pass max_new_tokens"),
        ({"nonsense": None}, "nonsense is not an argument of sessions, got None; leave it out"),
    ],
)
def test_an_argument_of_transformers_generate_is_refused_by_name(model: Any, argument: dict, remedy: str) -> None:
    session = Session.from_model(model, ExportableCache.from_model(model, 64))
    with pytest.raises(InputError, match=remedy):
        session.generate(tokens(3), **argument)
    with pytest.raises(InputError, match=remedy):
        session.prefill(tokens(3), **argument)
    assert session.length.tolist() == [0]
