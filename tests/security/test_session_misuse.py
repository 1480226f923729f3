"""Sessions used wrongly say so: two generators, two threads, two sessions over one cache, a step that was cut off."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from exportable_cache import ExportableCache, Session
from exportable_cache.errors import InputError

from ..support.kinds import KINDS
from ..support.models import tiny_model, tokens

CAPACITY = 64


#: With a layer whose state cannot be taken back.
RECURRENT = {
    "mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "qwen3_next": KINDS["qwen3_next"][0],
}


def session_of(kind: str = "llama", **options: Any) -> Session:
    model = tiny_model(kind, **RECURRENT.get(kind, {}))
    return Session.from_model(model, ExportableCache.from_model(model, CAPACITY), **options)


# -- generators ------------------------------------------------------------------------------------------------------


def test_a_second_generator_is_refused_until_the_first_is_finished_or_given_up() -> None:
    session = session_of()
    expected = list(session.generate(tokens(5), 6))
    session.reset()
    first = session.generate(tokens(5), 6)
    given = [next(first), next(first)]
    with pytest.raises(InputError, match="this session is generating"):
        next(session.generate(tokens(5), 6))
    # The first goes on as if nothing had been.
    assert [*given, *first] == expected
    session.reset()
    assert list(session.generate(tokens(5), 6)) == expected
    session.reset()
    first = session.generate(tokens(5), 6)
    next(first)
    first.close()
    assert len(list(session.generate(tokens(5), 6))) == 6


def test_a_generator_that_failed_gives_up_its_turn_even_while_its_error_is_kept() -> None:
    """As `sys.last_value` keeps it: its traceback holds the frames, and these the generator."""

    class Failing:
        max_tokens = 2

        def propose(self, context: Any, count: int, sampling: Any) -> Any:
            raise RuntimeError("of the draft")

    session = session_of(score_length=3)
    with pytest.raises(RuntimeError, match="of the draft") as kept:
        list(session.generate(tokens(5), 6, draft=Failing()))
    assert len(list(session.generate(tokens(5), 6))) == 6
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("use", ["reset", "rewind", "prefill", "decode", "load_state"])
def test_a_generator_whose_session_was_used_otherwise_stops(use: str, tmp_path: Any) -> None:
    session = session_of()
    session.prefill(tokens(3))
    session.save_state(tmp_path / "state")
    answer = session.generate(tokens(5), 6)
    next(answer)
    {
        "reset": session.reset,
        "rewind": lambda: session.rewind(1),
        "prefill": lambda: session.prefill(tokens(2)),
        "decode": lambda: session.decode(torch.tensor([1])),
        "load_state": lambda: session.load_state(tmp_path / "state"),
    }[use]()
    with pytest.raises(InputError, match="was reset, moved or used otherwise"):
        next(answer)
    # And another one may begin.
    assert len(list(session.generate(tokens(5), 6))) == 6


def test_forks_generate_side_by_side() -> None:
    session = session_of()
    session.prefill(tokens(5))
    fork = session.fork()
    first, second = session.generate(tokens(2), 6), fork.generate(tokens(2), 6)
    pairs = [(one, other) for one, other in zip(first, second)]
    assert len(pairs) == 6
    assert all(one == other for one, other in pairs)


# -- threads ---------------------------------------------------------------------------------------------------------


def test_no_answer_is_wrong_when_threads_share_a_session() -> None:
    session = session_of()
    expected = list(session.generate(tokens(5), 12))
    session.reset()
    found: list[Any] = []

    def ask() -> None:
        try:
            session.reset()
            found.append(list(session.generate(tokens(5), 12)))
        except InputError as error:
            found.append(str(error))

    for _ in range(10):
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 30
    answers = [answer for answer in found if isinstance(answer, list)]
    assert all(answer == expected for answer in answers)
    assert all("session" in error for error in found if isinstance(error, str))


def test_a_step_in_another_thread_is_not_waited_for() -> None:
    session = session_of()
    inside, go_on = threading.Event(), threading.Event()
    run = session.runner.run

    def slow(method: str, *inputs: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(20)
        return run(method, *inputs)

    session.runner.run = slow
    thread = threading.Thread(target=lambda: session.prefill(tokens(5)))
    thread.start()
    assert inside.wait(20)
    for call in (lambda: session.prefill(tokens(3)), session.reset):
        with pytest.raises(InputError, match="running a step already, in another thread"):
            call()
    go_on.set()
    thread.join()
    assert session.length.tolist() == [5]


# -- one cache -------------------------------------------------------------------------------------------------------


def test_two_sessions_over_one_cache_are_refused() -> None:
    model = tiny_model("llama")
    cache = ExportableCache.from_model(model, CAPACITY)
    first = Session.from_model(model, cache)
    with pytest.raises(InputError, match="belongs to another session"):
        Session.from_model(model, cache)
    first.close()
    second = Session.from_model(model, cache)
    del second
    Session.from_model(model, cache)


# -- steps that were cut off -----------------------------------------------------------------------------------------


def _cut_off(session: Session, error: BaseException, *, score: bool = False) -> None:
    """A step that has run and whose end the session does not see, as an interrupt between layers would leave it."""
    run = session.runner.run

    def cut_off(method: str, *inputs: torch.Tensor) -> torch.Tensor:
        run(method, *inputs)
        raise error

    session.runner.run = cut_off
    with pytest.raises(type(error)):
        session.decode(torch.tensor([7]))
    session.runner.run = run


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["interrupt", "error"])
def test_recurrent_models_say_that_a_step_did_not_finish(kind: str, error: BaseException, tmp_path: Any) -> None:
    session = session_of(kind)
    expected = session.prefill(tokens(6))
    session.reset()
    session.prefill(tokens(6)[:, :5])
    session.save_state(tmp_path / "state")
    _cut_off(session, error)
    for call in (
        lambda: session.decode(torch.tensor([7])),
        lambda: session.prefill(tokens(2)),
        lambda: next(session.generate(tokens(2), 3)),
        lambda: session.rewind(0),
        lambda: session.fork().decode(torch.tensor([7])),
        lambda: session.save_state(tmp_path / "other"),
    ):
        with pytest.raises(InputError, match=r"did not finish.*reset\(\).*load_state\(\)"):
            call()
    session.load_state(tmp_path / "state")
    assert (session.decode(tokens(6)[:, 5]) - expected).abs().max() <= 1e-4
    _cut_off(session, error)
    session.reset()
    assert (session.prefill(tokens(6)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_others_go_on_as_if_it_had_not_begun(kind: str) -> None:
    session = session_of(kind)
    expected = session.prefill(tokens(20))
    session.reset()
    session.prefill(tokens(20)[:, :19])
    _cut_off(session, KeyboardInterrupt())
    assert (session.decode(tokens(20)[:, 19]) - expected).abs().max() <= 1e-4


def test_logits_that_are_not_finite_are_told() -> None:
    for options in ({}, {"temperature": 1.0, "seed": 0}):
        session = session_of()
        session.prefill(tokens(3))
        with torch.no_grad():
            session.cache.layers[0].values.fill_(float("nan"))
        with pytest.raises(InputError, match="the logits are not finite at position 4"):
            next(session.generate(tokens(2), 3, **options))
        session.reset()
        steps = session.generate(tokens(2), 3, **options)
        next(steps)
        with torch.no_grad():
            session.cache.layers[0].values.fill_(float("nan"))
        with pytest.raises(InputError, match="the logits are not finite at position 2"):
            next(steps)
