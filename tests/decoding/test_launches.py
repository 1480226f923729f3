"""Several decode steps per launch: the tokens, the lengths and the cache of one step at a time."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from exportable_cache import ExportableCache, Session
from exportable_cache.decoding import ContinuousBatch
from exportable_cache.errors import CacheFullError, InputError

from ..support.compiling import compiling_with
from ..support.kinds import kind_model
from ..support.models import hybrid_model, tiny_model, tokens
from ..support.seq2seq import encoder_inputs, tiny_seq2seq

STEPS = 4
#: The window is 8: answers of 30 tokens go past it, and a stop within a launch takes back up to 3 of them.
SLACK = STEPS - 2
SETTINGS = [
    {},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3},
]


@pytest.fixture(scope="module")
def model() -> Any:
    model = hybrid_model()
    model.generation_config.eos_token_id = None
    return model


def session_of(
    model: Any,
    steps: int,
    rows: int = 1,
    length: int = 48,
    slack: int = SLACK,
    buckets: tuple = (16,),
    compile: bool | str = False,
) -> Session:
    cache = ExportableCache.from_model(model, length, rows, rollback_slots=slack)
    return Session.from_model(model, cache, compile=compile, prefill_chunk=16, buckets=buckets, steps_per_launch=steps)


def launched(session: Session) -> list[tuple[str, int]]:
    """Method and number of steps of every launch from now on, also of single tokens that are chosen from logits."""
    noted, run, choose = [], session.runner.run, session.runner.run_and_choose

    def note(method: str, *arguments: Any, steps: int) -> torch.Tensor:
        noted.append((method, steps))
        return choose(method, *arguments, steps=steps)

    def note_single(method: str, *arguments: Any) -> torch.Tensor:
        if arguments[0].shape[1] == 1:
            noted.append((method, 1))
        return run(method, *arguments)

    session.runner.run, session.runner.run_and_choose = note_single, note
    return noted


def followed(session: Session, prompt: torch.Tensor, *arguments: Any, **options: Any) -> list[tuple[Any, list[int]]]:
    """Tokens as they come, each with the lengths that the session states then."""
    given = session.generate(prompt, *arguments, **options)
    return [(token if isinstance(token, int) else token.tolist(), session.length.tolist()) for token in given]


@pytest.mark.parametrize("rows", [1, 2, 20])
@pytest.mark.parametrize("options", SETTINGS)
def test_tokens_and_lengths_are_those_of_one_step_at_a_time(model: Any, options: dict, rows: int) -> None:
    prompt = tokens(9, rows)
    plain, session = session_of(model, 1, rows), session_of(model, STEPS, rows)
    noted = launched(session)
    assert followed(session, prompt, 24, **options) == followed(plain, prompt, 24, **options)
    # From 9 tokens: four fit a bucket of 16, eight do not. 23 tokens after the first: five launches, and three steps.
    assert noted == [("decode_16", 4)] + [("decode", 4)] * 4 + [("decode", 1)] * 3
    following = tokens(3, rows, seed=1)
    torch.testing.assert_close(session.prefill(following), plain.prefill(following))


@pytest.mark.parametrize("place", range(6))
def test_tokens_behind_a_stop_are_dropped_and_the_cache_goes_on_from_there(model: Any, place: int) -> None:
    """Stops at every place of a launch, past the window of the sliding layer."""
    prompt, drawn = tokens(20, seed=2), {"temperature": 1.0, "seed": 5}
    answer = list(session_of(model, 1).generate(prompt, 20, **drawn))
    stop = next(token for token in answer[place + 1 :] if token not in answer[: place + 1])
    plain, session = session_of(model, 1), session_of(model, STEPS)
    expected = list(plain.generate(prompt, 20, stop=stop, **drawn))
    assert list(session.generate(prompt, 20, stop=stop, **drawn)) == expected
    assert expected[-1] == stop and len(expected) < 20
    assert session.length.tolist() == plain.length.tolist() == [20 + len(expected) - 1]
    following = torch.cat([torch.tensor([[stop]]), tokens(9, seed=3)], dim=1)
    torch.testing.assert_close(session.prefill(following), plain.prefill(following))


def test_rows_that_ended_give_padding_while_others_go_on(model: Any) -> None:
    prompt = tokens(9, 3, seed=4)
    first, second, _ = (
        list(row) for row in zip(*(step.tolist() for step in session_of(model, 1, 3).generate(prompt, 20)), strict=True)
    )
    stops = [first[2], second[6]]
    found = followed(session_of(model, STEPS, 3), prompt, 20, stop=stops)
    assert found == followed(session_of(model, 1, 3), prompt, 20, stop=stops)
    assert found[-1][0][:2] == [0, 0]


def test_the_last_slots_are_filled_step_by_step_and_a_full_cache_is_left_alone(model: Any) -> None:
    session, prompt = session_of(model, STEPS, length=19), tokens(9)
    noted = launched(session)
    assert list(session.generate(prompt)) == list(session_of(model, 1, length=19).generate(prompt))
    assert [steps for _, steps in noted] == [4, 4, 1, 1]
    assert session.room == 0
    kept = {name: tensor.clone() for name, tensor in session.runner.state.items()}
    with pytest.raises(CacheFullError, match="holds 19 of at most 19 tokens"):
        list(session.generate(tokens(1)))
    with pytest.raises(CacheFullError, match="holds 16 of at most 19 tokens, 4 more do not fit"):
        session.rewind(3)
        session.decode_and_choose(tokens(1)[0], object(), STEPS)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in session.runner.state.items())


def test_what_was_computed_ahead_is_dropped_when_the_session_moves_meanwhile(model: Any) -> None:
    def interrupted(steps: int) -> list[int]:
        # A launch takes up slack of the ring, which a rewind meanwhile misses.
        session = session_of(model, steps, slack=STEPS)
        given = session.generate(tokens(12), 16)
        found = [next(given) for _ in range(6)]
        session.rewind(2)
        session.prefill(tokens(2, seed=5))
        with pytest.raises(InputError, match="used otherwise since this generator gave out its last token"):
            next(given)
        return [*found, *session.generate(tokens(1, seed=6), 10)]

    assert interrupted(STEPS) == interrupted(1)


def test_a_rewind_meanwhile_knows_what_the_launch_has_overwritten(model: Any) -> None:
    def sixth(steps: int) -> Session:
        session = session_of(model, steps)
        given = session.generate(tokens(20), 16)
        for _ in range(6):
            next(given)
        return session

    sixth(1).rewind(3)
    session = sixth(STEPS)  # three steps past the token given out
    with pytest.raises(
        InputError, match=r"cannot rewind 1 tokens at a length of \[25\]: .* at most 0 can be taken back"
    ):
        session.rewind(1)


def test_a_fork_goes_on_from_the_token_that_was_given_out(model: Any) -> None:
    def both(session: Session) -> tuple[list[int], list[int]]:
        given = session.generate(tokens(12), 16)
        found = [next(given) for _ in range(6)]
        fork = session.fork()
        return [*found, *given], list(fork.generate(torch.tensor([found[-1:]]), 10))

    assert both(session_of(model, STEPS)) == both(session_of(model, 1))


def test_encoder_decoders_launch_several_steps_too() -> None:
    model = tiny_seq2seq("t5")
    model.generation_config.eos_token_id = None

    def answer(steps: int) -> list[tuple[Any, list[int]]]:
        cache = ExportableCache.from_model(model, 32, max_encoder_len=20)
        session = Session.from_model(model, cache, prefill_chunk=16, steps_per_launch=steps)
        session.encode(**encoder_inputs(model, 7))
        return followed(session, tokens(1), 12, temperature=1.0, seed=0)

    assert answer(STEPS) == answer(1)


DRAWN = {"temperature": 1.0, "seed": 3}


def one_at_a_time(model: Any, length: int, count: int) -> list[int]:
    return list(session_of(model, 1, length=80, buckets=()).generate(tokens(length, seed=length), count, **DRAWN))


def test_compiled_launches_recompile_nothing() -> None:
    # A ring alone, because its steps depend on the length; full layers in one graph: test_choosing_steps.py.
    model = hybrid_model(num_hidden_layers=1, layer_types=["sliding_attention"])
    model.generation_config.eos_token_id = None
    counters.clear()
    with compiling_with("eager"), torch._dynamo.config.patch(error_on_recompile=True):
        session = session_of(model, 2, length=80, buckets=(), compile=True)
        for length, count in ((9, 24), (3, 16), (40, 40)):
            session.reset()
            found = list(session.generate(tokens(length, seed=length), count, **DRAWN))
            assert found == one_at_a_time(model, length, count)
    assert counters["stats"]["unique_graphs"] == 3  # prefill; one step; a launch


@pytest.mark.full
def test_compiled_launches_copy_no_cache(model: Any) -> None:
    """In Inductor's code; that steps write in place: test_program.py."""
    with compiling_with("inductor"):
        session = session_of(model, 2, length=80, buckets=(), compile="wait")
        found, code = run_and_get_code(lambda: list(session.generate(tokens(9, seed=9), 4, **DRAWN)))
    assert found == one_at_a_time(model, 9, 4)
    # The prompt's graph has a symbol for its length.
    launch = max((text for text in code if not re.search(r"\bs\d+\b", text)), key=len)
    assert launch.count("empty_strided_cpu(") > 0
    # Keys and values [1, 2 heads, slots, 8]: two steps, written in place, and no buffer of that size beside them.
    for slots in (10, 80):
        assert re.search(rf"arg\d+_1 = rand_strided\(\(1, 2, {slots}, 8\)", launch)
        assert f"empty_strided_cpu((1, 2, {slots}, 8)" not in launch


def test_warm_up_covers_launches(model: Any) -> None:
    session = session_of(model, STEPS, buckets=(2, 16))
    noted = launched(session)
    session.warm_up()
    # A bucket of two has no room for four steps.
    assert set(noted) == {("decode", 1), ("decode", 4), ("decode_2", 1), ("decode_16", 1), ("decode_16", 4)}


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "4"])
def test_other_than_positive_ints_are_refused(model: Any, steps: Any) -> None:
    with pytest.raises(InputError, match="steps_per_launch must be an int of at least 1, got"):
        session_of(model, steps)


def test_what_could_not_be_taken_back_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="steps_per_launch must be at most 48, the tokens a row holds, got 49"):
        session_of(model, 49)
    with pytest.raises(
        InputError,
        match=r"must be at most 4, because layer 0 \(ring\) takes back at most 3 tokens, got 5; .*rollback_slots=3",
    ):
        session_of(model, 5)
    with pytest.raises(
        InputError, match=r"must be 1 for a model with layer 0 \(recurrent\), whose state cannot be taken back"
    ):
        session_of(kind_model("lfm2"), 2)
    with pytest.raises(InputError, match="must be 1 for 'pt2' programs"):
        Session(SimpleNamespace(methods={}), [], 128, batch_size=1, target="pt2", steps_per_launch=2)
    with pytest.raises(InputError, match="steps_per_launch must be 1 for a continuous batch, got 2"):
        ContinuousBatch.from_model(tiny_model("llama"), 32, 2, steps_per_launch=2)
